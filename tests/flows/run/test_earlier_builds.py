"""Estimates from earlier builds: the same work takes as long, other work as much longer as it computes to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.recipe.load import load_recipe
from flows.run.estimate import Assumptions, estimate, with_prompts
from flows.stage_contract.stage import hashed_config
from flows.stage_graphs import R1
from tasks.estimate.devices import DEVICES
from tasks.estimate.measured import processor_name
from tasks.estimate.stages import Estimate
from tasks.store.manifest import InputRef, Manifest

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 3, "vocab_size": 904,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def build(folder: Path, stage: str, seconds: float, *overrides: str, **more: object) -> Manifest:
    """A build of one of tiny's stages, which holds the shape of the model that it made."""
    step = next(step for step in R1 if step.name == stage)
    config = hashed_config(step.stage, step.config(load_recipe("tiny", [*overrides])), 7)
    files = {"config.json": {"size": 1, "sha256": "0"}}
    made = Manifest(stage, step.stage.version, stage * 8, stage, 1, "", seconds, config, {}, files, path=folder)
    return replace(made, **{"machine": processor_name(), "peak_memory": 10**9, **more})


def estimated(stage: str, builds: list[Manifest], *overrides: str) -> Estimate:
    known = Assumptions(DEVICES["cpu"], builds=builds)
    return estimate(R1, load_recipe("tiny", [*overrides]), known)[stage]


def test_the_same_stage_takes_what_it_took(home: Path) -> None:
    made = estimated("reasoning_rl", [build(home, "reasoning_rl", 64.0)])
    assert (made.source, made.seconds, made.source_key) == ("measured", 64.0, "reasoning_rl" * 8)
    assert made.peak == pytest.approx(1.1e9) and made.plain()["peak_memory_gb"] == pytest.approx(1.1)


def test_the_median_of_several_builds_and_their_largest_memory(home: Path) -> None:
    builds = [build(home, "reasoning_rl", s, peak_memory=p, key=str(s)) for s, p in ((60, 3), (64, 9), (900, 4))]
    made = estimated("reasoning_rl", builds)
    assert made.seconds == 64 and made.peak == pytest.approx(9 * 1.1)


def test_other_settings_are_scaled_by_what_both_compute_to(home: Path) -> None:
    before = estimated("reasoning_rl", [])
    twice = ("reasoning_rl.steps=140",)
    made = estimated("reasoning_rl", [build(home, "reasoning_rl", 64.0)], *twice)
    assert made.source == "scaled"
    assert made.seconds == pytest.approx(64.0 * estimated("reasoning_rl", [], *twice).seconds / before.seconds)
    assert 1.7 * 64 < made.seconds < 2 * 64  # a job's start is not doubled


def test_the_nearest_build_is_scaled(home: Path) -> None:
    builds = [
        build(home, "reasoning_rl", 640.0, "reasoning_rl.steps=700", key="far"),
        build(home, "reasoning_rl", 90.0, "reasoning_rl.steps=100", key="near"),
    ]
    assert estimated("reasoning_rl", builds).source_key == "near"


def test_data_of_earlier_stages_count(home: Path) -> None:
    """SFT's own settings are equal, but its data were half as many."""
    half = ("sft_data.problems=600", "sft_data.general=600")
    data = build(home, "sft_data", 5.0, *half, files={})
    trained = build(home, "sft", 50.0, inputs={"sft_data": InputRef("d", stage="sft_data", key=data.key)})
    made = estimated("sft", [data, trained])
    assert made.source == "scaled" and 1.5 * 50 < made.seconds < 2 * 50


def test_builds_elsewhere_say_nothing(home: Path) -> None:
    alone = estimated("reasoning_rl", [])
    assert alone.source == "computed" and alone.source_key is None
    for more in ({"machine": "NVIDIA H100 80GB HBM3"}, {"machine": None}, {"files": {}}):
        assert estimated("reasoning_rl", [build(home, "reasoning_rl", 64.0, **more)]) == alone
    of_gpu = Assumptions(DEVICES["H100"], builds=[build(home, "reasoning_rl", 64.0, machine="NVIDIA H100 80GB HBM3")])
    assert estimate(R1, load_recipe("tiny"), of_gpu)["reasoning_rl"].seconds == 64.0


def test_a_build_of_another_versions_settings_says_nothing(home: Path) -> None:
    old = build(home, "reasoning_rl", 64.0)
    old.config["steps"] = "many"
    assert estimated("reasoning_rl", [old]).source == "computed"


def test_prompts_are_as_long_as_the_recipes_own(home: Path) -> None:
    recipe = load_recipe("tiny")
    found = with_prompts(Assumptions(DEVICES["cpu"]), R1, recipe).assumed.prompt_tokens
    assert 15 < found < 40  # "compute 3 + 5 - 7", "Please write a short poem ..."
    (home / "own.jsonl").write_text('{"prompt": "' + "x" * 300 + '", "answer": "1"}\n')
    own = load_recipe("tiny", [f"problems.sources=[{{kind='file', path='{home}/own.jsonl', verifier='number'}}]"])
    assert with_prompts(Assumptions(DEVICES["cpu"]), R1, own).assumed.prompt_tokens == 10 + 300 / 3
    gone = load_recipe("tiny", [f"problems.sources=[{{kind='file', path='{home}/no.jsonl', verifier='number'}}]"])
    assert with_prompts(Assumptions(DEVICES["cpu"]), R1, gone).assumed.prompt_tokens == 256
