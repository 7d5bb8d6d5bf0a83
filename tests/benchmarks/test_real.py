"""The claims, the page and the candidates of benchmarks/real_*.py, without a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from flows.recipe.load import load_recipe
from tasks.problems.sources import ReasoningGymSource

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def record(seed: int, dev2: float) -> dict[str, Any]:
    def row(value: float) -> dict[str, Any]:
        ends = [value - 0.05, value + 0.05]
        kinds = {f"{of}{name}": value for of in ("", "other/") for name in ("pass@1", "pass@k")}
        general = {"refusal": 0.9, "over_refusal": 0.1, "refused_harmless": 0.0}
        wins = {"win_rate_dev3": value, "win_rate_dev3_lc": 0.45}
        intervals = {f"{name}_ci95": ends for name in kinds}
        return kinds | intervals | general | wins | {"k": 8, "format": 1.0, "mean_tokens": 30.0}

    values = {"base": 0.1, "dev1": 0.2, "dev2": dev2, "dev3": 0.4, "r1": 0.5}
    families = {name: {"gcd": row(value)} for name, value in values.items()}
    curve = {"reward_accuracy": {"1": 0.0, "2": 1.0, "10": 1.0}}
    return {
        "seed": seed,
        "commit": "0ab",
        "machine": "2 CPU cores",
        "result": {"stages": [], "checkpoints": {name: row(value) for name, value in values.items()}},
        "seconds": {"base": 60.0, "reasoning_rl": 1200.0},
        "reward_models": {"helpful_held_out_accuracy": 0.758, "safe_held_out_safe_right": 1.0},
        "families": families,
        "curves": {"reasoning_rl": curve, "alignment_rl": curve},
    }


def test_the_page_has_every_seed_and_names_what_fails_and_what_is_missing() -> None:
    from claims import Claims
    from real_learning import CLAIMS
    from real_page import page

    text = page(Claims.read(CLAIMS), [record(1007, 0.5), record(1011, 0.3)], [1007, 1011, 1012], "## What was tried")
    # Dev2 over Dev1: 0.5 - 0.2 and 0.3 - 0.2, of which the second is below 15 points.
    assert "| Dev2 over Dev1, pass@1 | at least 15.0 | 30.0 | 10.0, fails |" in text
    assert "| 1007 | 0ab | 21 | 2 CPU cores |" in text and "Settings were chosen on seed 0." in text
    assert "Not run yet: seed 1012." in text
    assert "| dev2 | 50.0 (45.0-55.0) | 50.0 (45.0-55.0) | 50.0 (45.0-55.0) | 50.0 (45.0-55.0) | 100.0 | 30 |" in text
    assert "| pass@1 | gcd |" in text
    assert "| r1 | 90.0 | 10.0 | 0.0 | 50.0 | 45.0 |" in text
    assert "The picture has seeds 1007, 1011." in text
    assert "right on 76% of pairs" in text and "on 100% of safe and - of unsafe" in text


def test_the_page_says_where_the_seeds_fall_short() -> None:
    from claims import Claims
    from real_learning import CLAIMS
    from real_page import page

    records = [record(1007, 0.5), record(1011, 0.5), record(1012, 0.5)]
    for of, r1 in zip(records, (0.1, 0.15, 0.05), strict=True):
        of["result"]["checkpoints"]["r1"] |= {"other/pass@1": r1, "other/pass@k": r1}
    records[1] |= {"seconds": {"base": 90 * 60.0}, "curves": {}}
    text = " ".join(page(Claims.read(CLAIMS), records, [1007, 1011, 1012], "## What was tried").split())
    assert "starts from the base model" in text and "It falls on each seed from there to R1" in text
    # Dev1 has 20.0.
    for seed, r1, change in ((1007, "10.0", "-10.0"), (1011, "15.0", "-5.0"), (1012, "5.0", "-15.0")):
        cells = f"20.0 (15.0-25.0) | {r1} (45.0-55.0) | {change}"
        assert f"| {seed} | {cells} | {cells} |" in text
    assert "about 60 minutes of work a seed. Above it: 90 on seed 1011." in text
    assert "The picture has seeds 1007, 1012. The record of seed 1011 has no curves." in text
    records[0]["result"]["checkpoints"]["r1"] |= {"other/pass@1": 0.3}
    assert "It falls in 5 of 6 cases" in page(Claims.read(CLAIMS), records, [1007], "## What was tried")


def test_what_people_wrote_is_kept(tmp_path: Path) -> None:
    from claims import Claims
    from real_learning import CLAIMS
    from real_page import TRIED, page, tried

    path = tmp_path / "real.md"
    assert tried(path) == f"{TRIED}\n\nNothing is written here yet."
    own = f"{TRIED}\n\nA rate of 1e-5 was too small.\n\n## Notes\n\nMore."
    path.write_text(page(Claims.read(CLAIMS), [record(1007, 0.5)], [1007], own))
    assert tried(path) == own


def test_curves_are_drawn_over_steps_in_order(tmp_path: Path) -> None:
    from real_page import draw, smoothed

    assert smoothed([0.0, 1.0, 1.0, 1.0, 1.0, 2.0]) == [0.0, 0.5, 2 / 3, 0.75, 0.8, 1.2]
    draw([record(1007, 0.5)], tmp_path / "images" / "real.png")
    assert (tmp_path / "images" / "real.png").stat().st_size > 10_000


@pytest.mark.parametrize("curves", [{}, {"reasoning_rl": {}, "alignment_rl": {}}, {"reasoning_rl": {"reward": {}}}])
def test_a_record_without_a_step_has_no_curves(curves: dict[str, Any], tmp_path: Path) -> None:
    from claims import Claims
    from real_learning import CLAIMS
    from real_page import draw, page

    records = [record(1007, 0.5), record(1011, 0.5) | {"curves": curves}]
    text = page(Claims.read(CLAIMS), records, [1007, 1011], "## What was tried")
    assert "The picture has seed 1007. The record of seed 1011 has no curves." in text
    draw(records[1:], tmp_path / "real.png")
    assert not (tmp_path / "real.png").exists()


def test_each_seeds_curves_are_read_by_a_process_in_its_own_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow exports the address of the first home that a process opens, and children inherit it."""
    import real_learning

    asked: list[tuple[str, str, bool]] = []

    def child(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command[-1], env["R1FLOW_HOME"], "MLFLOW_TRACKING_URI" in env))
        return subprocess.CompletedProcess(command, 0, stdout='{"reasoning_rl": {}}\n')

    monkeypatch.setattr(real_learning.subprocess, "run", child)
    monkeypatch.setenv("R1FLOW_HOME", "mine")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    homes = [tmp_path / "seed-1007", tmp_path / "seed-1011"]
    assert [real_learning.curves(home) for home in homes] == [{"reasoning_rl": {}}] * 2
    assert asked == [("--curves", str(home), False) for home in homes]
    assert os.environ["R1FLOW_HOME"] == "mine" and "MLFLOW_TRACKING_URI" not in os.environ


def test_that_process_prints_the_curves_of_the_latest_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import real_learning

    from flows import runs

    frame = pd.DataFrame({"reward_accuracy": [0.5, float("nan"), 1.0], "other": 1.0}, index=[1, 2, 3])
    latest = SimpleNamespace(curves=lambda stage: frame if stage == "reasoning_rl" else frame[["other"]])
    monkeypatch.setattr(runs, "load", {"latest": latest}.get)
    monkeypatch.setattr(sys, "argv", ["real_learning.py", "--curves"])
    assert real_learning.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"reasoning_rl": {"reward_accuracy": {"1": 0.5, "3": 1.0}}, "alignment_rl": {}}


@pytest.mark.parametrize(
    ("of_record", "model", "runs"),
    [({}, None, False), ({"model": "other"}, None, True), ({}, "other", True), ({"model": "other"}, "other", False)],
)
def test_a_record_counts_for_its_model_alone(
    of_record: dict[str, str], model: str | None, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_learning

    ran: list[list[str]] = []

    def run(seed: int, work: Path, overrides: list[str]) -> dict[str, Any]:
        ran.append(overrides)
        return record(seed, 0.5)

    shown = {name: str(tmp_path / value) for name, value in of_record.items()}
    mark = {"version": real_learning.r1_version("real"), "overrides": []} | shown
    (tmp_path / "seed-1007.json").write_text(json.dumps(mark | record(1007, 0.5)))
    monkeypatch.setattr(real_learning, "run", run)
    monkeypatch.setattr(real_learning, "fetch_model", lambda work: tmp_path / "default")
    arguments = ["--seeds", "1007", "--work", str(tmp_path), *(["--model", str(tmp_path / model)] if model else [])]
    monkeypatch.setattr(sys, "argv", ["real_learning.py", *arguments])
    assert real_learning.main() == 0
    assert ran == ([[f"base.model={tmp_path / (model or 'default')}"]] if runs else [])
    kept = json.loads((tmp_path / "seed-1007.json").read_text())
    assert kept.get("model") == (str(tmp_path / model) if model else None)


def test_the_seeds_of_the_page_were_not_tuned_on() -> None:
    from claims import Claims
    from real_learning import CLAIMS

    rule = Claims.read(CLAIMS).seeds
    assert rule.seeds() == [1007, 1011, 1012]
    assert not set(rule.seeds()) & set(rule.tuned_on)


def test_no_stage_trains_on_the_other_family() -> None:
    from real_page import OTHER

    recipe = load_recipe("real")
    trained = {source.family for source in recipe.problems.sources if isinstance(source, ReasoningGymSource)}
    (other,) = recipe.evaluate.sets
    assert other.name == OTHER and isinstance(other.source, ReasoningGymSource)
    assert trained and other.source.family not in trained


def test_every_candidate_makes_problems() -> None:
    from real_families import CANDIDATES, candidate

    from tasks.evaluation.sets.run import read_sets

    for name in CANDIDATES:
        problems = read_sets([candidate(name, 4)], seed=0)[candidate(name, 4).name]
        assert len(problems) == 4 and all(problem.verifier == "reasoning_gym" for problem in problems), name


def test_records_are_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import real_learning

    def error(records: Path) -> str:
        arguments = ["--show", "--work", tmp_path / "work", "--records", records]
        monkeypatch.setattr(sys, "argv", ["real_learning.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            real_learning.main()
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    (tmp_path / "file").write_text("")
    assert error(tmp_path / "file").endswith("file is a file; give a folder")
    assert "no seed has been run with this version" in error(tmp_path / "none")
    assert not (tmp_path / "none").exists() and not (tmp_path / "work").exists()  # nothing is made to be shown
