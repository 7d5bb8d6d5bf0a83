"""Scores of a group: rules and steps in the pool, failures counted once a completion."""

from __future__ import annotations

import dataclasses

import pytest

from grpo.config.scoring import Scoring
from grpo.data.records import Problem
from grpo.data.template import parse
from grpo.errors import TrainingStopped
from grpo.rewards.functions import Response
from grpo.scoring.scorer import Failures, Scorer

PROBLEM = Problem("hens", [], "277", "number", "reasoning", "en", "test")


def responses(*texts: str) -> list[Response]:
    return [Response(text, parse(text), tokens=9, finished=True, max_tokens=20) for text in texts]


def test_a_completion_that_fails_twice_is_one_broken_completion():
    broken = "tests.support.user_rewards:broken"
    scorer = Scorer({broken: {}, "format": {}}, Scoring(workers=1), step_reward=broken)
    try:
        texts = ("<think>subtract</think><answer>277</answer>", "no steps here")
        scored = scorer.start(PROBLEM, responses(*texts)).finish()
    finally:
        scorer.close()
    assert scored.breakdowns == [{broken: 0.0, "format": 1.0}, {broken: 0.0, "format": 0.0}]
    assert scored.steps == [[], []]
    # The reward fails for both, the step reward for the one that has a step.
    assert scored.failures.kinds == {"error": 3}
    assert (scored.failures.completions, scored.failures.broken) == (2, 2)


def test_a_benchmarks_programs_have_more_time_than_other_answers():
    metadata = {"tests": [{"stdin": "", "stdout": "1"}], "code_grading": {"test_s": 6.0}}
    problem = Problem("slow", [], "", "code", "reasoning", "en", "test", metadata)
    scorer = Scorer({"accuracy": {}}, Scoring(workers=1, time_limit_s=0.5))
    try:
        program = "import time\ntime.sleep(1)\nprint(1)"
        scored = scorer.start(problem, responses(f"<think>wait</think><answer>{program}</answer>")).finish()
    finally:
        scorer.close()
    assert scored.breakdowns == [{"accuracy": 1.0}] and not scored.failures.kinds


def test_general_prompts_have_no_steps():
    scorer = Scorer({"format": {}}, Scoring(workers=1), step_reward="reduction")  # "reduction" needs a numeric answer
    try:
        general = dataclasses.replace(PROBLEM, domain="general", answer="", verifier="none")
        scored = scorer.start(general, responses("<think>2 + 2</think><answer>hello</answer>")).finish()
    finally:
        scorer.close()
    assert scored.steps is None and not scored.failures.kinds


def test_one_that_breaks_a_quick_reward_costs_the_others_nothing():
    """Quick rewards of a group are computed in one go; when that fails, each by itself shows whose fault it was."""
    good, bad = responses("<think>subtract</think><answer>277</answer>", "")
    bad = dataclasses.replace(bad, parts=None)
    scorer = Scorer({"accuracy": {}, "format": {}, "length": {"per_token": 1.0}}, Scoring(workers=1))
    try:
        scored = scorer.start(PROBLEM, [good, bad]).finish()
    finally:
        scorer.close()
    assert scored.breakdowns == [
        {"accuracy": 1.0, "format": 1.0, "length": -9.0},
        {"accuracy": 0.0, "format": 0.0, "length": -9.0},
    ]
    assert scored.failures.kinds == {"error": 2}  # accuracy and format both read the parts
    assert (scored.failures.completions, scored.failures.broken) == (2, 1)


def test_a_reward_of_ones_own_may_say_that_it_is_quick():
    name, plain = "tests.support.user_rewards:doubtful", "tests.support.user_rewards:brief"
    scorer = Scorer({name: {}, plain: {}}, Scoring(workers=1))
    try:
        scores = scorer.start(PROBLEM, responses("277", "277 hens"))
        assert list(scores.quick) == [name] and [list(slow) for slow in scores.slow] == [[plain]] * 2
        assert scores.finish().breakdowns == [{name: 1.0, plain: 0.0}] * 2
        scored = scorer.start(PROBLEM, responses("277", "")).finish()
        assert [found[name] for found in scored.breakdowns] == [1.0, 0.0]
        assert (scored.failures.completions, scored.failures.broken) == (2, 1)
    finally:
        scorer.close()


def test_more_than_the_share_stops_and_names_the_first():
    failures = Failures(completions=4, broken=2, example="ZeroDivisionError: division by zero")
    failures.stop_above(0.5)
    failures.add(Failures(completions=1, broken=1, example="another"))
    with pytest.raises(TrainingStopped, match="rewards failed for 3 of 5 completions .*ZeroDivisionError"):
        failures.stop_above(0.5)
