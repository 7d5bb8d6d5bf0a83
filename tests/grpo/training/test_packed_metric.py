"""Every training step says whether the model ran packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.job_runner import RL, SFT, metrics, run_here, write_job


@pytest.mark.system
@pytest.mark.parametrize(("attention", "packed"), [("packed", 1), ("plain", 0)])
def test_in_supervised_training_and_in_rl(
    attention: str, packed: int, sft_fields: dict[str, Any], rl_fields: dict[str, Any], tmp_path: Path
) -> None:
    hardware = {"device": "cpu", "attention": attention}
    for kind, fields, settings in (("sft", sft_fields, SFT | {"epochs": 1}), ("rl", rl_fields, RL | {"steps": 2})):
        job = {**fields, "settings": settings | {"hardware": hardware}}
        run_here(write_job(tmp_path / kind, kind, **job))
        found = metrics(tmp_path / kind)
        assert found
        assert [record["packed"] for record in found] == [packed] * len(found)
