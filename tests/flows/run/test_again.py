"""One stage again by the command, on a real run: what is stale, why, brought up to date, promoted, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
FEWER = ("--set", "evaluate.samples_per_problem=1", "--set", "evaluate.problems=6", "--set", "evaluate.general=4")


def stale_stages(r1: Any) -> list[str]:
    return sorted(line.split()[1] for line in r1("stages").stdout.splitlines() if "stale: " in line)


def test_a_stage_that_is_made_again_makes_stale_and_from_brings_up_to_date(r1: Any, first_run: dict[str, Any]) -> None:
    r1.tiny("run")  # whatever other tests made: the recipe's own artifacts are current now
    assert stale_stages(r1) == []
    r1.tiny("run", "--only", "evaluate", *FEWER)
    assert stale_stages(r1) == ["report"]
    r1.tiny("run", "--from", "report", *FEWER)
    assert stale_stages(r1) == []


def test_why_promote_and_export_take_references(r1: Any, first_run: dict[str, Any], tmp_path: Path) -> None:
    again = r1.tiny("run", "--only", "evaluate", *FEWER)
    old, new = (run["run_id"] for run in (first_run, again))
    why = r1("why", f"{old[:12]}:evaluate", f"{new[:12]}:evaluate").stdout.splitlines()[1:]
    assert why == ["  general: 16 -> 4", "  problems: 24 -> 6", "  samples_per_problem: 4 -> 1"]
    promoted = r1("promote", f"{old}:alignment_rl")
    assert promoted.returncode == 0 and "champion@tiny is alignment_rl" in promoted.stderr
    assert r1("export", "champion", str(tmp_path / "r1")).returncode == 0
    config = json.loads((tmp_path / "r1" / "config.json").read_text())
    assert config["hidden_size"] == 48 and "# r1" in (tmp_path / "r1" / "README.md").read_text()
    assert json.loads(r1("show", "dev1@tiny", "--json").stdout)["stage"] == "cold_start_sft"


def test_the_estimate_lies_beside_the_runs_own_numbers(r1: Any, first_run: dict[str, Any]) -> None:
    database, artifacts = r1.home / "mlflow.db", r1.home / "mlartifacts" / "tiny"
    estimated = json.loads((artifacts / first_run["run_id"] / "artifacts" / "estimate.json").read_text())
    assert set(estimated["stages"]) == {stage["name"] for stage in first_run["stages"]}
    import sqlite3

    metrics = sqlite3.connect(database)
    peaks = metrics.execute("select value from metrics where key = 'system/peak_memory_gb'").fetchall()
    assert len(peaks) >= 5 and all(0 < value < 64 for (value,) in peaks)
    in_one_step = """
        select metrics.key from metrics join runs using (run_uuid) where runs.name like 'reasoning_rl%'
        and metrics.key not like 'system/%' group by metrics.key having max(metrics.step) = 0"""
    assert metrics.execute(in_one_step).fetchall() == []  # "Model metrics" of a training run has only curves
