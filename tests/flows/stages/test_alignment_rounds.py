"""Rounds of alignment in the recipe's graph: which stages, from which inputs; the run itself is in
test_other_recipes.py."""

from __future__ import annotations

import pytest

from flows.recipe.load import load_recipe
from flows.run.gates.checks import check_gates
from flows.stage_contract.stage import Step, hashed_config
from flows.stage_graphs import GRAPHS, R1
from grpo.errors import InputError


def graph(*overrides: str) -> dict[str, Step]:
    return {step.name: step for step in GRAPHS["r1"](load_recipe("tiny", overrides))}


def test_one_round_is_the_recipe_as_it_was() -> None:
    assert [*graph().values()] == [*R1]


def test_three_rounds() -> None:
    steps = graph("alignment.rounds=3")
    assert [*steps][-7:] == [
        "alignment_rl", "reward_models_2", "alignment_rl_2", "reward_models_3", "alignment_rl_3", "evaluate", "report"
    ]  # fmt: skip
    assert [*steps["reward_models_3"].inputs] == ["problems", "alignment_rl_2", "reward_models", "reward_models_2"]
    assert [*steps["alignment_rl_3"].inputs] == ["problems", "sft_data", "alignment_rl_2", "reward_models_3"]
    judged_by = steps["evaluate"].inputs
    assert judged_by["reward_models"] == "reward_models_3"
    assert {"alignment_rl", "alignment_rl_2", "alignment_rl_3"} <= judged_by.keys()


def test_the_first_round_and_what_is_before_it_do_not_depend_on_later_ones() -> None:
    def hashed(*overrides: str) -> dict[str, object]:
        recipe = load_recipe("tiny", overrides)
        steps = GRAPHS["r1"](recipe)[:9]
        return {step.name: hashed_config(step.stage, step.config(recipe), recipe.seed) for step in steps}

    found = hashed("alignment.rounds=2", "alignment.replay_share=0.5")
    assert [*found][-1] == "alignment_rl" and found == hashed()


def test_the_replayed_share_and_no_file_of_preferences_decide_a_later_round() -> None:
    def hashed(share: float) -> dict[str, object]:
        changes = ["alignment.rounds=2", f"alignment.replay_share={share}", "reward_models.files=[{path='a.jsonl'}]"]
        recipe = load_recipe("tiny", changes)
        step = next(step for step in GRAPHS["r1"](recipe) if step.name == "reward_models_2")
        return hashed_config(step.stage, step.config(recipe), recipe.seed)

    tenth, half = hashed(0.1), hashed(0.5)
    assert tenth["files"] == [] and (tenth.pop("replay_share"), half.pop("replay_share")) == (0.1, 0.5)
    assert tenth == half


def test_a_gate_may_stand_behind_a_later_round() -> None:
    level = 'metric = "pass@1", source = "evaluation", not_below_stage = "alignment_rl", points = 3'
    gate = f'gates=[{{name = "level", after = "alignment_rl_2", evaluate = {{}}, conditions = [{{{level}}}]}}]'
    recipe = load_recipe("tiny", [gate, "alignment.rounds=2"])
    assert check_gates(recipe.gates, GRAPHS["r1"](recipe), ()) == recipe.gates
    with pytest.raises(InputError, match="gate 'level': unknown stage 'alignment_rl_2'"):
        load_recipe("tiny", [gate])


def test_later_rounds_need_prompts() -> None:
    with pytest.raises(InputError, match="later rounds judge what the policy answers"):
        load_recipe("tiny", ["alignment.rounds=2", "reward_models.prompts=0", "reward_models.files=[{path='a.jsonl'}]"])
