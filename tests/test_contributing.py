"""What CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from grpo.algorithms import objectives
from grpo.config.rl import RL
from grpo.data.records import Problem
from grpo.data.template import parse
from grpo.rewards import functions

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
REWARD, OBJECTIVE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def settings(**fields) -> RL:
    return RL.model_validate(
        {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-6}, **fields}
    )


def test_the_new_reward(monkeypatch):
    monkeypatch.setattr(functions, "REWARDS", dict(functions.REWARDS))
    exec(REWARD, vars(functions) | {"REWARDS": functions.REWARDS})
    term = settings(rewards={"one_word": {"weight": 0.5, "bonus": 2.0}}).rewards["one_word"]
    problem = Problem("hens", [], "277", "number", "reasoning", "en", "test")
    for answer, score in (("277", 2.0), ("277 hens", 0.0)):
        text = f"<think>subtract</think><answer>{answer}</answer>"
        response = functions.Response(text, parse(text), tokens=9, finished=True, max_tokens=20)
        assert functions.score_one("one_word", term.options, problem, response) == score
    assert functions.total({"one_word": 2.0}, {"one_word": term.weight}) == 1.0


def test_the_new_objective(monkeypatch):
    monkeypatch.setattr(objectives, "OBJECTIVES", dict(objectives.OBJECTIVES))
    exec(OBJECTIVE, vars(objectives) | {"OBJECTIVES": objectives.OBJECTIVES})
    objective = objectives.Objective(
        settings(objective="squared_penalty").objective,
        clip_eps_low=0.2,
        clip_eps_high=0.25,
        kl_coef=0,
        kl_estimator="k3",
        kl_stale_correction=False,
    )
    ones = torch.ones(1, 1)
    tokens = objectives.Tokens(
        logprobs=ones * math.log(1.5), old_logprobs=ones * 0, ref_logprobs=None, advantages=ones * 2, mask=ones
    )
    loss, _ = objective(tokens, objectives.Scale(sequences=1, tokens=1, budget=1))
    # 1.5 * 2 - 0.5^2 / (2 * 0.25) = 3 - 0.5, to be maximised.
    assert loss.item() == pytest.approx(-2.5)


def test_a_name_that_is_nowhere_is_refused():
    with pytest.raises(ValueError, match="choose from grpo, "):
        settings(objective="ppo2")
