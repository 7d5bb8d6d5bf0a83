"""Measures how often a judge and the rules agree on the same answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo.data.records import Problem
from grpo.rewards.judged import reads_reference
from grpo.rewards.verifiers import COMPARING


def agreement(scored: Iterable[tuple[Problem, Mapping[str, float]]]) -> dict[str, float]:
    """Agreement of judge and rule. Counts answers that both a rule and a judge decided. `scored`: each problem with the
    scores that rule and judge gave an answer to it, without zeros for failures and missing verdicts (`Scored.given`).

    For `judge` and for `rubric`, if there are any such answers: NAME_checked: their number; NAME_agreement: share on
    which both agree (a rubric score of at least half counts as right); NAME_false_correct: share of answers wrong by
    the rule that the judge calls right; NAME_false_incorrect: share of answers right by the rule that the judge calls
    wrong.
    """
    verdicts: dict[str, list[tuple[bool, bool]]] = {"judge": [], "rubric": []}
    for problem, given in scored:
        if problem.verifier in COMPARING and given.get("accuracy") in (0.0, 1.0) and reads_reference(problem):
            for name, pairs in verdicts.items():
                if name in given:
                    pairs.append((given["accuracy"] == 1.0, given[name] >= 0.5))
    numbers: dict[str, float] = {}
    for name, pairs in verdicts.items():
        if pairs:
            numbers[f"{name}_checked"] = float(len(pairs))
            numbers[f"{name}_agreement"] = sum(rule == judge for rule, judge in pairs) / len(pairs)
        for label, side in (("false_correct", False), ("false_incorrect", True)):
            if of_side := [judge for rule, judge in pairs if rule is side]:
                numbers[f"{name}_{label}"] = sum(judge is not side for judge in of_side) / len(of_side)
    return numbers
