"""Rule rewards: the breakdown of each branch, and its weighted sum."""

from __future__ import annotations

import pytest

from grpo.config import Hardware, RewardWeights
from grpo.data import Problem
from grpo.rewards import rule_rewards, total
from grpo.scoring import Scorer
from grpo.template import parse

HENS = [{"role": "user", "content": "325 chickens, 28 roosters, 20 do not lay. How many lay eggs?"}]
REASONING = Problem("hens", HENS, "277", "number", "reasoning", "en", "test")
GENERAL = Problem("poem", [{"role": "user", "content": "A poem?"}], "", "none", "general", "en", "test")


@pytest.mark.parametrize(
    ("completion", "breakdown"),
    [
        ("<think>we subtract</think><answer>277</answer>", {"accuracy": 1, "format": 1, "language": 1}),
        ("<think>we subtract</think><answer>305</answer>", {"accuracy": 0, "format": 1, "language": 1}),
        ("<think>wir ziehen ab</think><answer>277</answer>", {"accuracy": 1, "format": 1, "language": 0}),
        ("So <think>we subtract</think><answer>277</answer>", {"accuracy": 1, "format": 0, "language": 1}),
        ("<think>we subtract</think>277", {"accuracy": 0, "format": 0, "language": 1}),
        ("<answer>277</answer>", {"accuracy": 1, "format": 0, "language": 0}),
        ("", {"accuracy": 0, "format": 0, "language": 0}),
    ],
)
def test_breakdown_of_a_reasoning_problem(completion, breakdown):
    assert rule_rewards(REASONING, parse(completion)) == breakdown


def test_a_general_prompt_has_no_accuracy():
    assert rule_rewards(GENERAL, parse("<think>we write</think><answer>Roses</answer>")) == {"format": 1, "language": 1}


def test_the_hens_group():
    outputs = [f"<think>we subtract</think><answer>{n}</answer>" for n in (277, 305, 277, 297)]
    assert [rule_rewards(REASONING, parse(o))["accuracy"] for o in outputs] == [1, 0, 1, 0]


def test_total_is_the_weighted_sum():
    weights = RewardWeights(accuracy=2.0, format=0.5, language=0.25, helpful=0.1, safe=4.0)
    assert total({"accuracy": 1.0, "format": 1.0, "language": 0.5}, weights) == pytest.approx(2.625)
    assert total({"format": 1.0, "language": 0.0, "helpful": -3.0, "safe": 0.5}, weights) == pytest.approx(2.2)
    # R1-Zero: accuracy + format, language not counted.
    assert total({"accuracy": 1.0, "format": 1.0, "language": 0.5}, RewardWeights()) == 2


def test_preference_models_score_general_prompts_only():
    completion = "<think>a draft</think><answer>Roses</answer>"
    scorer = Scorer(None, None, Hardware(device="cpu"))
    read: dict[str, list[str]] = {}

    def model(name, score):
        def scores(messages, responses):
            assert messages == [GENERAL.messages]
            read[name] = responses
            return [score]

        return scores

    scorer.helpful, scorer.safe = model("helpful", 2.5), model("safe", 0.0)  # type: ignore[assignment]
    problems = [REASONING, GENERAL]
    reasoning, general = scorer(problems, [parse(completion)] * 2, [completion] * 2)
    assert reasoning.keys() == {"accuracy", "format", "language"}
    assert general["helpful"] == 2.5
    assert general["safe"] == 0.5  # the probability of a logit of 0
    # The helpful model reads the summary only, the safety model the whole response.
    assert read == {"helpful": ["Roses"], "safe": [completion]}
