"""The page of a run that failed, with what models may write, from a real MLflow store."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import NormalDist

import pytest

from tasks.evaluation.reward_model import CONFIDENCE
from tasks.judges.calibration import _NORMAL_975
from tasks.report.data_sections import funnels
from tasks.report.page import duration, estimates, gates, render
from tasks.store.manifest import Manifest
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.recipe_run import RecipeRun, load_run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(default_uri(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def failed(record: Tracking, tmp_path_factory: pytest.TempPathFactory) -> RecipeRun:
    """A run whose second stage failed after it had learned for two steps."""
    config = {"description": EVIL, "gates": [{"name": "good", "after": "base"}, {"name": "better", "after": "sft"}]}
    decision = {"approved": True, "who": EVIL, "note": "fine", "when": "2026-01-01T10:00:00+00:00"}
    tags = {
        "r1flow.flow": "train_r1",
        "r1flow.seed": "0",
        "r1flow.failed": "reasoning_rl",
        "r1flow.error": f"no space left {EVIL}",
        "r1flow.gate.good": "approved",
        "r1flow.gate.good.evidence": "FAILED: pass@1 is 0.1; must be above 0.5",
        "r1flow.gate.good.decision": json.dumps(decision),
    }
    run_id = record.recipe_run("r", "train_r1 seed 0", config, tags)
    old = {"r1flow.stage": "base", "r1flow.status": "ran", "r1flow.stale": "problems is new"}
    base = record.stage_run(run_id, "r", "base", {}, old)
    record.log_metrics(base, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5, "peak_memory_gb": 0.25}])
    estimate = {"device": {"name": "H200"}, "stages": {"base": {"seconds": 7200.0, "peak_memory_gb": 0.5}, "sft": {}}}
    record.log_text(run_id, json.dumps(estimate), "estimate.json")
    record.finish(base, "FINISHED")
    rl = record.stage_run(
        run_id, "r", "rl", {}, {"r1flow.stage": "reasoning_rl", "r1flow.status": "failed", "r1flow.error": EVIL}
    )
    record.log_metrics(rl, [{"step": s, "reward": 1.0 + s, "reward_format": 1.0, "kl": 0.1} for s in (1, 2)])
    record.finish(rl, "FAILED")
    record.finish(run_id, "FAILED")
    run = record.reader.run(run_id)
    assert run is not None
    return load_run(record.reader, Store(tmp_path_factory.mktemp("store")), run)


@pytest.fixture(scope="module")
def page(failed: RecipeRun, record: Tracking) -> str:
    answer = {"checkpoint": EVIL, "text": EVIL, "tokens": 3, "cut_off": False, "rewards": {"accuracy": 1.0}}
    item = {"domain": "reasoning", "number": 1, "prompt": EVIL, "gold": EVIL, "answers": [answer]}
    return render(failed, {"table": {EVIL: {"pass@1": 0.5}}, "completions": [item]}, record.reader)


class Seen(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_what_models_wrote_is_text(page: str) -> None:
    seen = Seen(page)
    assert not {"script", "img"} & set(seen.tags) and not [name for name, _ in seen.attributes if name.startswith("on")]
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 7  # description, errors, decision, completion, ...


def test_it_needs_nothing_from_elsewhere(page: str) -> None:
    addresses = [value for name, value in Seen(page).attributes if name in ("src", "href", "srcset", "data")]
    assert addresses and all(value and value.startswith("#") for value in addresses)
    assert "url(" not in page and "@import" not in page


def test_a_failed_run_says_what_ran_and_what_failed(page: str) -> None:
    assert "<strong>reasoning_rl failed.</strong> no space left" in page
    assert re.search(r'<th scope="row">base</th><td class="ran">', page)
    assert re.search(r'<th scope="row">reasoning_rl</th><td class="failed">', page)
    assert page.count("stale: problems is new") == 1
    assert "reasoning_rl: Reward</title>" in page and "reasoning_rl: Reward, format</title>" in page


def test_gates_and_decisions(failed: RecipeRun) -> None:
    good, better = gates(failed)
    assert (good["status"], good["decision"]["note"]) == ("approved", "fine")
    assert better["status"] == "not reached" and better["evidence"] == []


def test_the_estimate_beside_what_it_took(failed: RecipeRun, record: Tracking, page: str) -> None:
    found = estimates(failed, record.reader)
    assert found is not None and found["device"] == "H200"
    base, sft = found["rows"]
    assert (base["estimated"], base["memory"], base["actual_memory"]) == (7200.0, 0.5, 0.25)
    assert (sft["estimated"], sft["actual"], sft["actual_memory"]) == (None, None, None)  # it was not reached
    assert "Estimated for H200." in page and "2 h 00 min" in page


def manifest(stage: str, counts: dict[str, int]) -> Manifest:
    return Manifest(stage, 1, "k", "d", 1, "", 1.0, {}, {}, {}, counts=counts, path=Path("/nowhere"))


def test_the_funnel_of_problems_adds_up() -> None:
    counts = {
        "source0_read": 60, "source0_duplicates": 3, "source1_read": 40, "source1_bad_records": 2,
        "duplicates_across_sources": 1, "reasoning_held_out": 10, "reasoning_train": 70, "general_train": 6,
        "decontamination_overlapping": 3,
    }  # fmt: skip
    (funnel,) = funnels({"problems": manifest("problems", counts)})
    found = {row["name"]: row["count"] for row in funnel["rows"]}
    assert funnel["whole"] == "100 read" and sum(found.values()) == 100
    assert found["duplicate"] == 4 and found["held out beyond the maximum"] == 5
    assert [row["name"] for row in funnel["rows"] if row["kept"]] == ["to train on, reasoning", "to train on, general"]


def test_intervals_of_checkpoints_have_the_recipes_confidence_and_those_of_judges_95_percent(
    failed: RecipeRun, record: Tracking
) -> None:
    """No setting changes the intervals of judges and reward models: see tasks/judges/calibration.py and
    tasks/evaluation/reward_model.py."""
    measured = {"held_out_accuracy": 0.9, "held_out_accuracy_low": 0.85, "held_out_accuracy_high": 0.95}
    evaluation = replace(manifest("evaluate", {}), config={"confidence": 0.8})
    models = replace(manifest("reward_models", {}), metrics={f"helpful_{n}": value for n, value in measured.items()})
    stages = [replace(failed.stages[0], name=made.stage, manifest=made) for made in (evaluation, models)]
    run = replace(failed, stages=tuple(stages))
    page = render(run, {"table": {"r1": {"pass@1": 0.5, "pass@1_ci95": [0.4, 0.6]}}}, record.reader)
    assert "its 80% bootstrap interval over problems" in page and "85.0% to 95.0%" in page
    assert "with 95% intervals, which the recipe" in page
    assert CONFIDENCE == 0.95 and round(NormalDist().cdf(_NORMAL_975), 3) == 0.975


def test_durations() -> None:
    assert [duration(s) for s in (None, 1.26, 59.6, 3700)] == ["–", "1.3 s", "1 min 00 s", "1 h 01 min"]
