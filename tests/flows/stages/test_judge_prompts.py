"""Prompts in the keys of the stages that ask them: another wording makes their artifacts once more."""

from __future__ import annotations

from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import evaluate, reward_models, sft_data
from grpo.config.judge import JudgeSettings
from grpo.judging.questions import DIGESTS
from tasks.judges.prompt_digests import EVALUATION_DIGESTS, PROMPT_DIGESTS

MODEL = '{kind="openai",base_url="http://judge.example/v1",model="m"}'
STAGES = {
    "evaluate": evaluate.stage_for(["sft"]),
    "sft_data": sft_data.STAGE,
    "reward_models": reward_models.STAGE,
}
RULE_AND_MODEL = pytest.mark.parametrize(
    "sets", [[], [f"{name}.judge={MODEL}" for name in STAGES]], ids=("rule", "model")
)


def asked(sets: list[str]) -> dict[str, Any]:
    """Digests of prompts in the key of each stage of `tiny`."""
    recipe = load_recipe("tiny", sets)
    return {
        name: hashed_config(stage, getattr(recipe, name), seed=0)["judge_prompts"] for name, stage in STAGES.items()
    }


@RULE_AND_MODEL
def test_keys_of_earlier_versions_hold(sets: list[str]) -> None:
    assert asked(sets) == {
        "evaluate": EVALUATION_DIGESTS,
        "sft_data": PROMPT_DIGESTS,
        "reward_models": PROMPT_DIGESTS,
    }


@RULE_AND_MODEL
def test_another_wording_changes_the_keys_of_stages_whose_judge_verifies(
    sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = asked(sets)
    monkeypatch.setitem(DIGESTS, "criterion", "f" * 64)
    changed = {name for name, digests in asked(sets).items() if digests != before[name]}
    assert changed == ({"evaluate", "sft_data"} if sets else set())


def test_samples_are_of_the_wording_by_which_they_were_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    config, judge = (
        load_recipe("tiny").sft_data,
        JudgeSettings(kind="openai", base_url="http://j.example/v1", model="m"),
    )
    unjudged, judged = sft_data._how_sampled(config, None), sft_data._how_sampled(config, judge)
    monkeypatch.setitem(DIGESTS, "criterion", "f" * 64)
    assert sft_data._how_sampled(config, None) == unjudged
    assert sft_data._how_sampled(config, judge) == judged | {"criterion": "f" * 64}
