"""Counts how many steps of a worked calculation are right, judging each step on its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from grpo.data.records import Problem, Sample
from grpo.data.template import TAG
from grpo.rewards.arithmetic import Side, agree, chains, expressions, value
from grpo.rewards.text import before_result

_ANSWER = re.compile(r"<answer>[^<]*+</answer>")


def steps_right(problem: Problem, text: str) -> list[bool]:
    """Whether each step of a completion is right, in order. A step is a line with arithmetic before the result.

    A line with equations is right if all of them are true. If the problem is an expression to reduce, a line with only
    an expression is right if it has the same value as the line before it (for the first line, the problem's value). So
    the steps after a slip can be right again. Other lines are not steps.
    """
    gold = value(problem.answer.strip())
    reduced = gold is not None and any(value(found) == gold for found in expressions(problem.text))
    before = Side(gold) if reduced else None
    right = []
    for line in before_result(TAG.sub("\n", _ANSWER.sub("", text))).splitlines():
        found = [[side for side in chain if side.value is not None] for chain in chains(line)]
        if equations := [pair for chain in found for pair in itertools.pairwise(chain)]:
            right.append(all(agree(left, other) for left, other in equations))
            before = None
        elif before is not None and (sides := [side for chain in found for side in chain]):
            right.append(agree(sides[-1], before))
            before = sides[-1]
    return right


def step_metrics(samples: Sequence[Sample], problems: Mapping[str, Problem]) -> dict[str, float]:
    """Metrics over samples to reasoning problems. `stepwise`: share of samples that work step by step. `steps_right`:
    share of all their steps that are right. `stated_stepwise`: share of those samples whose stated result is right.
    Empty if there are no steps."""
    judged = [(sample, steps_right(problems[sample.problem_id], sample.completion)) for sample in samples]
    worked = [(sample, steps) for sample, steps in judged if steps]
    if not worked:
        return {}
    every = [step for _, steps in worked for step in steps]
    stated = [sample.rewards["stated"] for sample, _ in worked if "stated" in sample.rewards]
    metrics = {"stepwise": len(worked) / len(samples), "steps_right": sum(every) / len(every)}
    return metrics | ({"stated_stepwise": sum(stated) / len(stated)} if stated else {})
