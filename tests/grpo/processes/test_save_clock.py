"""Checkpoints that are due by time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo.processes import save_clock
from grpo.processes.save_clock import SaveClock
from tests.support.job_runner import metrics, run_here, write_job


def test_one_is_due_after_ten_minutes_or_twenty_times_what_the_last_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(save_clock, "monotonic", lambda: now)
    clock = SaveClock()

    def due(at: float) -> bool:
        nonlocal now
        now = at
        return clock.due

    assert not due(599) and due(600)
    with clock.saving():
        now = 700.0  # it took 100 s, so the next one is due 2,000 s later
    assert not due(2699) and due(2700)
    with clock.saving():
        now = 2701.0
    assert not due(3300) and due(3301)


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_job_of_long_steps_saves_after_each(
    kind: str,
    tmp_path: Path,
    rl_fields: dict[str, Any],
    sft_fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_clock, "LONGEST_S", 0.0)
    monkeypatch.setattr(save_clock, "COST", float("inf"))
    fields = {"rl": rl_fields, "sft": sft_fields}[kind]
    run_here(write_job(tmp_path, kind, **{**fields, "settings": {**fields["settings"], "save_every": 1000}}))
    last = len(metrics(tmp_path))
    # The two newest are kept. None is written after the last step.
    kept = sorted(path.name for path in (tmp_path / "state").glob("step-*"))
    assert kept == [f"step-{last - 2:08d}", f"step-{last - 1:08d}"]
