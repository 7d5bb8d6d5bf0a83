"""The branches of the reward: their weights, and what each makes of the whole."""

from __future__ import annotations

import pytest

from grpo.config.common import Sampling
from grpo.config.rl import RL as Settings
from grpo.scoring.reward_weights import branch_of, branch_parts, reward_weights
from tests.support.job_runner import RL, metrics, run, write_job


def test_reward_models_are_the_preference_branch_and_all_else_is_rules():
    names = ("accuracy", "format", "language", "helpful", "safe", "mine:brief")
    assert [branch_of(name) for name in names] == ["rule", "rule", "rule", "preference", "preference", "rule"]


def test_a_reward_weighs_its_own_weight_times_its_branchs():
    settings = Settings(
        steps=1,
        sampling=Sampling(max_new_tokens=8),
        optimizer={"learning_rate": 0.001},
        rewards={"accuracy": 2.0, "format": 0.5, "helpful": 3.0},
        branch_weights={"rule": 2.0, "preference": 0.5},
    )
    # The safety model and the judge have no weight here; they are shown all the same, and move nothing.
    unweighted = {"safe": 0.0, "judge": 0.0, "rubric": 0.0}
    assert reward_weights(settings) == {"accuracy": 4.0, "format": 1.0, "helpful": 1.5, **unweighted}


def test_each_branch_has_a_mean_and_a_spread():
    weights = {"format": 0.5, "accuracy": 1.0, "helpful": 0.5, "safe": 2.0}
    breakdowns = [
        {"format": 1.0, "helpful": 6.0, "safe": 0.5},  # rule 0.5, preference 3 + 1 = 4
        {"format": 0.0, "helpful": 2.0, "safe": 0.5},  # rule 0, preference 1 + 1 = 2
        {"format": 1.0, "accuracy": 1.0},  # rule 1.5, no preference
        {"format": 0.0, "accuracy": 0.0},  # rule 0
    ]
    parts = branch_parts(breakdowns, weights)
    assert parts["preference_mean"] == 3.0 and parts["preference_std"] == 1.0
    assert parts["rule_mean"] == 0.5
    # Squares of 0, -0.5, 1, -0.5: 1.5; over four, 0.375.
    assert parts["rule_std"] == pytest.approx(0.375**0.5)


def test_a_branch_that_no_completion_has_is_not_shown():
    assert branch_parts([{"accuracy": 1.0}], {"accuracy": 1.0}) == {"rule_mean": 1.0, "rule_std": 0.0}


@pytest.mark.system
def test_the_branches_add_up_to_the_reward(sft, problems, reward_models, tmp_path):
    settings = {
        **RL,
        "steps": 2,
        "minibatches": 1,
        "general_last_steps": 1,
        "general_share": 0.5,
        "rewards": {"accuracy": 1, "format": 1, "helpful": 0.1, "safe": 1},
        "branch_weights": {"rule": 0.5, "preference": 2.0},
    }
    fields = {"settings": settings, "model": sft / "out", "problems": [problems]}
    models = {"helpful_model": reward_models["pairs"] / "out", "safe_model": reward_models["points"] / "out"}
    run(write_job(tmp_path, "rl", **fields, **models))
    before, mixed = metrics(tmp_path)
    assert "reward_preference_mean" not in before
    assert before["reward"] == pytest.approx(before["reward_rule_mean"])
    assert mixed["reasoning_reward"] == pytest.approx(mixed["reasoning_reward_rule_mean"])
    rule, preference = mixed["general_reward_rule_mean"], mixed["general_reward_preference_mean"]
    assert mixed["general_reward"] == pytest.approx(rule + preference)
    assert rule == pytest.approx(0.5 * mixed["general_reward_format"])
    assert preference == pytest.approx(2 * (0.1 * mixed["general_reward_helpful"] + mixed["general_reward_safe"]))
    assert mixed["general_reward_preference_std"] > 0
