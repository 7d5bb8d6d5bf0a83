"""What single benchmarks compare, keep and write, without their measurements."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.tags import FLOW_TAG, STAGE_TAG, STATUS_TAG

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def side(rate: float, peak_mb: float) -> dict[str, Any]:
    parts = {"sampling": 1.0, "update": 2.0}
    sizes = {"peak_mb": peak_mb, "high_water_mb": peak_mb, "completion_tokens": 50.0}
    flops = {"update_flops_per_s": 1.0, "peak_flops_per_s": 2.0}
    return {"tokens_per_s": rate, "step_s": 100 / rate, "prompt_tokens": 100, "parts": parts, **sizes, **flops}


def test_trl_counts_with_its_faster_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured at 135M: TRL makes 49 tokens/s in 32 at once, 52 in 8 at once, and ours 138."""
    import grpo_vs_trl
    from grpo_case import Case

    runs = {32: side(49.0, 12_549.0), 8: side(52.0, 6_089.0)}

    def run_side(name: str, case: Case, *_: Any) -> dict[str, Any]:
        return side(138.0, 4_063.0) if name == "ours" else runs[case.trl_rows]

    case = Case("", "", [[]] * 4, 8, 64, 0.001, 600, 32, 2, 2, 0)
    monkeypatch.setattr(grpo_vs_trl, "make_case", lambda *_: case)
    monkeypatch.setattr(grpo_vs_trl, "run_side", run_side)
    args = argparse.Namespace(trl_rows=None, rounds=3, portable=False, full=False, threads=2)
    found = grpo_vs_trl.compare("small", args)
    assert found["throughput_ratio"] == pytest.approx(138 / 52) and found["memory_ratio"] == pytest.approx(4063 / 6089)
    assert found["trl"][32]["throughput_ratio"] == pytest.approx(138 / 49)
    given = ["--setting", "small", "--rounds", "3", "--output", str(tmp_path / "page.md"), "--json"]
    monkeypatch.setattr(sys, "argv", ["grpo_vs_trl.py", *given])
    text = grpo_vs_trl.markdown({"small": found}, None, args)
    assert "\n`python benchmarks/grpo_vs_trl.py --setting small --rounds 3`, at commit " in text
    assert str(tmp_path) not in text


def test_methods_are_kept_for_their_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import methods

    evaluated: list[str] = []

    def evaluate(work: Path, *_: Any) -> dict[str, float]:
        evaluated.append(work.name)
        work.mkdir(parents=True)
        return {"pass@1": 0.5}

    monkeypatch.setattr(methods, "VARIANTS", {})  # Dev1 alone
    monkeypatch.setattr(methods, "dev1", lambda home, seed: {"problems": tmp_path, "cold_start_sft": tmp_path})
    monkeypatch.setattr(methods, "evaluate", evaluate)
    assert methods.measure(tmp_path, 0) == methods.measure(tmp_path, 0) and len(evaluated) == 1
    before = methods.version()
    monkeypatch.setattr(methods, "r1_version", lambda name: "another recipe")
    methods.measure(tmp_path, 0)
    assert methods.version() != before and len(evaluated) == 2


def test_methods_are_evaluated_as_the_recipe_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import methods

    tasks: list[dict[str, Any]] = []
    monkeypatch.setattr(methods, "train", lambda kind, work, **job: tasks.extend(job["tasks"]))
    monkeypatch.setattr(methods, "read_samples", lambda path: [])
    monkeypatch.setattr(methods, "reasoning_metrics", lambda samples, confidence: {})
    methods.evaluate(tmp_path, tmp_path, tmp_path, 0)
    sampling = load_recipe("tiny").evaluate.sampling
    assert {name: getattr(sampling, name) for name in tasks[0]["sampling"]} == tasks[0]["sampling"]
    assert tasks[0]["sampling"]["max_new_tokens"] == 112


def test_the_page_of_methods_names_tuned_seeds_and_its_picture_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import methods

    metrics = {"pass@1": 0.5, "pass@1_ci95": [0.4, 0.6], "language": 1.0, "mean_tokens": 24.0}
    results = {name: {"metrics": metrics, "curve": [0.5]} for name in ("dev1", *methods.VARIANTS)}
    monkeypatch.setattr(methods, "measure", lambda folder, seed: results)
    monkeypatch.setattr(methods, "draw", lambda by_seed, path: path.touch())
    (tmp_path / "pictures").mkdir()
    places = ["--output", str(tmp_path / "page.md"), "--plot", str(tmp_path / "pictures" / "methods.png")]
    monkeypatch.setattr(sys, "argv", ["methods.py", "--seeds", "0", "4008", "2", *places])
    assert methods.main() == 0
    text = (tmp_path / "page.md").read_text()
    assert text == capsys.readouterr().out[:-1] and "](pictures/methods.png)" in text
    assert "Seeds on which the recipe's settings, and so GRPO's, were tuned: 0, 2." in text
    assert re.search(r"^`python benchmarks/methods.py --seeds 0 4008 2`, at commit ", text, re.MULTILINE)


def test_the_page_of_reward_hacking_names_all_that_is_changed() -> None:
    """Against the recipe: twice the learning rate, `safe` at half, rules at a fifth, the rest at twice."""
    import reward_hacking

    before = load_recipe("tiny").alignment_rl
    after = load_recipe("tiny", [*reward_hacking.unrestrained(120), "alignment_rl.health={}"]).alignment_rl
    assert after.optimizer.learning_rate == 2 * before.optimizer.learning_rate
    assert after.rewards["safe"].weight == before.rewards["safe"].weight / 2
    assert after.branch_weights.rule == before.branch_weights.rule / 5
    assert after.branch_weights.preference == 2 * before.branch_weights.preference
    text = " ".join(reward_hacking.markdown(120, 0, {}, "failed").split())
    for words in ("preference rewards at twice theirs", "`safe` counts half as much", "twice the learning rate"):
        assert words in text and words in " ".join((PAGES / "reward_hacking.md").read_text().split())


PAGES = Path(__file__).parents[2] / "docs" / "measured"


def finished_run(record: Tracking, *metrics: str) -> tuple[str, str]:
    """The ids of a recipe run and of its RL stage."""
    run = record.recipe_run("tiny", "run", {}, {FLOW_TAG: "r1"})
    stage = record.stage_run(run, "tiny", "reasoning_rl", {}, {STAGE_TAG: "reasoning_rl", STATUS_TAG: "ran"})
    for name in metrics:
        record.client.log_metric(stage, name, 0.5, step=1)
    for each in (stage, run):
        record.finish(each, "FINISHED")
    return run, stage


def test_points_go_to_the_run_whose_report_is_written(tmp_path: Path) -> None:
    import report_load

    from grpo.errors import InputError

    record = Tracking(default_uri(tmp_path))
    (asked, its_stage), (_, newer_stage) = finished_run(record, "loss", "reward"), finished_run(record, "loss")
    stage = report_load.rl_stage(tmp_path, asked)
    assert stage.id == its_stage
    assert report_load.rl_stage(tmp_path, "latest").id == newer_stage
    assert report_load.add_points(tmp_path, stage, 10) == 5
    counts = {run: len(record.reader.curve(run, "loss")) for run in (its_stage, newer_stage)}
    assert counts == {its_stage: 6, newer_stage: 1}
    empty, _ = finished_run(record)
    with pytest.raises(InputError, match="has no metrics of reasoning_rl; give another run"):
        report_load.rl_stage(tmp_path, empty)
