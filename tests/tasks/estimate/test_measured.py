"""What a build used, from the files of its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo import train
from tasks.estimate.measured import Usage, processor_name, usage
from tests.support.job_runner import write_job

VERL = {"trainer": {"kind": "verl", "python": "/opt/verl/bin/python"}}


@pytest.mark.parametrize("hardware", [{}, VERL])
def test_a_job_of_another_trainer_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: dict[str, object]
) -> None:
    """Its processes hold the memory, and may be on GPUs: the process that starts them is no measure."""
    monkeypatch.setattr(train, "RUNNERS", {"sft": "builtins:id"})  # does nothing
    monkeypatch.setattr(train, "TRAINERS", {"verl": {"sft": "builtins:id"}})
    settings = {"optimizer": {"learning_rate": 1e-3}, "hardware": hardware}
    job = write_job(tmp_path / "sft", "sft", settings=settings, model="m", data="d")
    assert train.run(train.read_job(job)) == 0
    assert (tmp_path / "sft" / "memory.json").exists() == (not hardware)
    assert usage(tmp_path) == (Usage(None, 0) if hardware else Usage(processor_name(), usage(tmp_path).peak_memory))
