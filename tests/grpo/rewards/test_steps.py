"""Steps of the reasoning and what they are worth, by hand."""

from __future__ import annotations

import math
import random
import sys

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.processes.pool import Pool
from grpo.rewards.steps import STEP_REWARDS, equations, find, reduction, split_steps, step_rewards
from tasks.problems.miniature.writers import Habits, sum_reasoning

SUM = Problem("sum", [{"role": "user", "content": "compute 2 + 5 + 3 - 3"}], "7", "number", "reasoning", "en", "test")


def test_steps_are_the_lines_of_the_reasoning():
    text = "Well\n<think>\n  325 - 28 = 297 \n\n297 - 20 = 277</think>\n<answer>277</answer>"
    assert [text[start:end] for start, end in split_steps(text)] == ["325 - 28 = 297", "297 - 20 = 277"]
    assert split_steps("<think>a</think>") == [(7, 8)]
    assert [("<reasoning>é\r\nb")[s:e] for s, e in split_steps("<reasoning>é\r\nb")] == ["é", "b"]
    assert split_steps("325 - 28 = 297") == split_steps("<think> \n </think>") == split_steps("") == []


@pytest.mark.parametrize(
    ("step", "reward"),
    [
        ("8 - 1 = 7", 1),
        ("8 - 1 = 6", 0),
        ("2 * 3 = 6 and 6 + 1 = 8", 0),
        ("1/3 = 0.33", 1),
        ("x = 3 * 4 = 12", 1),
        ("x = 3 * 4 = 13", 0),
        ("x + 1 = 7", None),
        ("we subtract 28 roosters", None),
        ("", None),
    ],
)
def test_equations(step, reward):
    assert equations(SUM, step) == reward


@pytest.mark.parametrize(
    ("step", "reward"),
    [
        ("first 5 + 3 - 1", 1),
        ("then 8 - 1", 1),
        ("so the result is 7", 1),
        ("then 8 - 2", 0),
        ("so the result is -7", 0),
        ("9 - 3 = 6, and 6 + 1", 1),
        ("7 = 9 - 3", 0),
        ("let me see", None),
    ],
)
def test_reduction(step, reward):
    assert reduction(SUM, step) == reward


def test_the_miniatures_steps_keep_their_value_until_a_slip():
    rng = random.Random(0)
    good = Habits(mixes_languages=0.5, slips=0, answers=1, courteous=1, refuses=1)
    reasoning, answer = sum_reasoning("2 + 5 + 3 - 3", "en", good, rng)
    assert answer == "7"
    text = f"<think>\n{reasoning}\n</think>\n<answer>7</answer>"
    # first 7 + 3 - 3, then 10 - 3, then 7, so the result is 7
    assert [reward for _, reward in step_rewards("reduction", SUM, text)] == [1, 1, 1, 1]
    slipped = "<think>first 7 + 3 - 3\nthen 11 - 3\nthen 8\nso the result is 8</think>"
    assert [reward for _, reward in step_rewards("reduction", SUM, slipped)] == [1, 0, 0, 0]


def test_step_rewards_stand_where_the_steps_end():
    text = "<think>8 - 1 = 7\nwait\n7 + 1 = 9</think><answer>7</answer>"
    # <think> has 7 characters, "8 - 1 = 7" 9, and the line to judge begins at 7 + 9 + 1 + 4 + 1 = 22.
    assert step_rewards("equations", SUM, text) == [(16, 1), (31, 0)]
    assert step_rewards("equations", SUM, "277") == []


def test_reduction_needs_a_number():
    city = Problem("city", SUM.messages, "Paris", "exact", "reasoning", "en", "test")
    with pytest.raises(InputError, match="problem city: step reward 'reduction' needs a number .* not 'Paris'"):
        reduction(city, "8 - 1")


OWN = """
def starts_well(problem, step):
    return {"first": 0.5, "nan": float("nan"), "text": "1"}.get(step.split()[0])
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_steps.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_steps:starts_well"
    sys.modules.pop("own_steps", None)


def test_a_users_own_step_reward_in_a_pool(own):
    with Pool(1, 30, None) as pool:
        assert pool.submit(step_rewards, own, SUM, "<think>first 8\nthen 7</think>").result() == [(14, 0.5)]


@pytest.mark.parametrize("line", ["nan", "text"])
def test_only_finite_numbers_are_rewards(own, line):
    with pytest.raises(ValueError, match="step reward 'own_steps:starts_well' gave (nan|'1'), which is no finite"):
        step_rewards(own, SUM, f"<think>{line}</think>")


def test_unknown_step_rewards():
    with pytest.raises(InputError, match="unknown step reward 'equation'; did you mean 'equations'"):
        find("equation")
    with pytest.raises(InputError, match="known are equations, reduction"):
        find("xyz")
    with pytest.raises(InputError, match="cannot import module 'no_module'"):
        find("no_module:f")


def test_every_step_reward_takes_anything():
    for reward in STEP_REWARDS.values():
        for step in ("", "=" * 99, "∞ + 𝟙 = ½", "9^9^9^9", "(" * 500, "- - - 1"):
            found = reward(SUM, step)
            assert found is None or math.isfinite(found)
