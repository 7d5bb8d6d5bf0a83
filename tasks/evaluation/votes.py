"""Majority votes: which answers to a problem are the same, and which answer most samples gave (cons@k)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from grpo.data.records import Problem, Sample
from grpo.processes.pool import Failure, Pool
from grpo.rewards.verifiers import COMPARING, QUICK, agree, exact, number

TIME_LIMIT_S, MEMORY_BYTES = 20.0, 4_000_000_000
"""Limits for comparing the answers to one problem, because a model wrote each of them."""


def votes(groups: Mapping[str, Sequence[Sample]], problems: Mapping[str, Problem]) -> dict[str, list[int | None]]:
    """For each problem, the class of each sample's answer; None without an answer.

    Two answers are in one class if the problem's verifier calls them equal, right or wrong: 1/2, 0.5 and \\frac{1}{2}
    under `math`. Under a verifier that compares with the reference, all right answers are in one class. If a verifier
    needs processes that can be killed (`math`) and breaks a limit on a problem, that problem's answers are compared by
    value and text.
    """
    classes: dict[str, list[int | None]] = {}
    waiting: list[tuple[str, Future[Any]]] = []
    pool: Pool | None = None
    try:
        for pid, group in groups.items():
            problem, answers = problems[pid], [sample.answer for sample in group]
            right = [sample.rewards.get("accuracy", 0.0) >= 1.0 for sample in group]
            classes[pid] = classify(problem, answers, right, compared_by_rule=False)
            if problem.verifier in COMPARING.keys() - QUICK and len({*classes[pid]} - {None}) > 1:
                pool = pool or Pool(os.cpu_count() or 1, TIME_LIMIT_S, MEMORY_BYTES)
                waiting.append((pid, pool.submit(classify, problem, answers, right)))
        for pid, future in waiting:
            found = future.result()
            if not isinstance(found, Failure):
                classes[pid] = found
    finally:
        if pool is not None:
            pool.close()
    return classes


def classify(
    problem: Problem, answers: Sequence[str], right: Sequence[bool], compared_by_rule: bool = True
) -> list[int | None]:
    """The class of each answer to one problem: the number of the first answer that it equals. See `votes`.

    `compared_by_rule`: if false, answers under a slow verifier are compared only by value and text. This is for
    untrusted answers in a process that cannot be killed.
    """
    by_rule = compared_by_rule or problem.verifier in QUICK or problem.verifier not in COMPARING
    firsts: list[int] = []
    known: dict[str, int] = {}
    first_right = next((n for n, ok in enumerate(right) if ok), None) if problem.verifier in COMPARING else None
    classes: list[int | None] = []
    for place, answer in enumerate(answers):
        if not answer.strip():
            classes.append(None)
            continue
        if answer not in known:
            if first_right is not None and right[place]:
                same: int | None = first_right
            else:
                same = next(
                    (n for n in firsts if n != first_right and _same(problem, answer, answers[n], by_rule)), None
                )
            known[answer] = place if same is None else same
            if same in (None, place):
                firsts.append(place)
        classes.append(known[answer])
    return classes


def _same(problem: Problem, answer: str, other: str, by_rule: bool) -> bool:
    if by_rule:
        return agree(problem, answer, other)
    asked = Problem("", [], other, problem.verifier, problem.domain, problem.language, "")
    return bool(number(asked, answer) or exact(asked, answer))


def consensus(group: Sequence[Sample], classes: Sequence[int | None], k: int) -> float:
    """Share of groups of k samples, in their order, whose most frequent answer is right. Its mean over problems is
    cons@k. Leftover samples count in no group.

    Samples without an answer do not vote. In a tie, the answer that came first wins: samples are independent, so this
    is a fair draw that anybody can repeat.
    """
    wins = [_winner(group[start : start + k], classes[start : start + k]) for start in range(0, len(group) - k + 1, k)]
    return sum(wins) / len(wins)


def _winner(group: Sequence[Sample], classes: Sequence[int | None]) -> float:
    counts = Counter(name for name in classes if name is not None)
    if not counts:
        return 0.0
    winner = counts.most_common(1)[0][0]  # ties are resolved in order of first votes
    return group[list(classes).index(winner)].rewards["accuracy"]
