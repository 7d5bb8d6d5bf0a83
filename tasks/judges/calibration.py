"""Calibration of a judge: its agreement with rules on answers that rules have verified.

Where no rule applies, the judge alone decides. So its agreement with rules elsewhere is the only measure of its
quality.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from grpo.data.records import Problem, Sample
from grpo.errors import InputError
from grpo.judging.questions import question_of
from grpo.rewards.verifiers import COMPARING
from grpo.scoring.agreement import agreement
from tasks.judges.base import Claim, Judge, Verdict

logger = logging.getLogger(__name__)

_NORMAL_975 = 1.959963984540054
"""97.5% quantile of the normal distribution, for 95% intervals."""


class Verified(NamedTuple):
    """A claim, and whether rules call it correct."""

    claim: Claim
    right: bool


def has_reference(problem: Problem) -> bool:
    """Whether a right answer is one that means the same as the problem's reference, which a judge can compare. Not so
    for programs, whose tests are no reference, nor for reasoning-gym's scorers, which may accept many answers."""
    return problem.verifier in COMPARING and bool(problem.answer.strip())


def verified(samples: Iterable[Sample], problems: Mapping[str, Problem]) -> Iterator[Verified]:
    """Samples whose answers a rule compared with a reference, as a judge can too. Partial accuracy is left out, because
    it is no verdict."""
    for sample in samples:
        problem, accuracy = problems[sample.problem_id], sample.rewards.get("accuracy")
        if has_reference(problem) and accuracy in (0.0, 1.0) and sample.answer.strip():
            yield Verified(Claim(question_of(problem.messages), problem.answer, sample.answer), accuracy == 1.0)


def calibrate(
    judge: Judge,
    items: Iterable[Verified],
    minimum: float,
    *,
    size: int,
    seed: int = 0,
    on_disagreement: Literal["warn", "stop"] = "warn",
) -> dict[str, float]:
    """The judge's agreement with the rules on `size` items, as metrics. Empty if no items are requested or available,
    or if the judge is itself a rule.

    - agreement: share of decided items on which judge and rule agree, 0 if nothing was decided; agreement_low and
      _high: its 95% Wilson interval
    - undecided_share: share of all items; false_correct_rate: share of wrong items that the judge called correct, which
      would get into the data; false_incorrect_rate: share of right items that it called incorrect, which would be lost;
      both rates are left out if there are no such items; right, wrong: number of such items

    Half of the items are right and half are wrong, as far as available. If the agreement is below `minimum`, a warning
    is logged or InputError is raised.
    """
    if not judge.fallible or size == 0:
        return {}
    chosen = choose(items, size, seed)
    if not chosen:
        return {}
    numbers = measure(chosen, judge.correct_all([item.claim for item in chosen]))
    if numbers["agreement"] < minimum:
        message = (
            f"the judge agrees with the rules on {numbers['agreement']:.1%} (95% interval "
            f"{numbers['agreement_low']:.1%} to {numbers['agreement_high']:.1%}) of {len(chosen)} verified answers, "
            f"with {numbers['undecided_share']:.1%} of them undecided; agreement_min is {minimum:.1%}"
        )
        if on_disagreement == "stop":
            raise InputError(f"judge: {message}; take a better judge, lower agreement_min, or let on_disagreement warn")
        logger.warning("%s", message)
    return numbers


def choose(items: Iterable[Verified], size: int, seed: int) -> list[Verified]:
    """`size` distinct random items, half correct and half incorrect; more of one kind if there are too few of the
    other.

    The choice depends on the items and the seed, not on their order. At most 2 * `size` items are in memory.
    """
    lowest: dict[bool, dict[int, Verified]] = {True: {}, False: {}}
    heaps: dict[bool, list[int]] = {True: [], False: []}
    for item in items:
        held, heap, key = lowest[item.right], heaps[item.right], _key(item, seed)
        if key in held or (len(heap) == size and key > -heap[0]):
            continue
        held[key] = item
        heapq.heappush(heap, -key)
        if len(heap) > size:
            del held[-heapq.heappop(heap)]
    right, wrong = (sorted(lowest[side].items()) for side in (True, False))
    taken = min(len(right), max((size + 1) // 2, size - len(wrong)))
    return [item for _, item in sorted(right[:taken] + wrong[: size - taken])]


def measure(items: Iterable[Verified], verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Metrics as described in `calibrate`."""
    seen = [(item.right, verdict) for item, verdict in zip(items, verdicts, strict=True)]
    right, wrong = [v for is_right, v in seen if is_right], [v for is_right, v in seen if not is_right]
    agreeing = right.count("correct") + wrong.count("incorrect")
    decided = sum(verdict != "undecided" for _, verdict in seen)
    low, high = wilson(agreeing, decided)
    numbers = {
        "agreement": _share(agreeing, decided),
        "agreement_low": low,
        "agreement_high": high,
        "undecided_share": _share(len(seen) - decided, len(seen)),
        "right": len(right),
        "wrong": len(wrong),
    }
    if wrong:
        numbers["false_correct_rate"] = wrong.count("correct") / len(wrong)
    if right:
        numbers["false_incorrect_rate"] = right.count("incorrect") / len(right)
    return numbers


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion (Wilson 1927); (0, 1) if there are no trials."""
    if trials == 0:
        return 0.0, 1.0
    z2 = _NORMAL_975**2
    middle = (hits + z2 / 2) / (trials + z2)
    half = _NORMAL_975 * math.sqrt(hits * (trials - hits) / trials + z2 / 4) / (trials + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def judge_agreement(samples: Iterable[Sample], problems: Mapping[str, Problem]) -> dict[str, float]:
    """Agreement of the judge and of rubrics with the rules, on samples that both scored; see grpo/scoring/agreement.py.
    Empty if there are none. Criteria of a rubric that the judge left undecided count as not fulfilled, and answers
    whose rule failed as wrong."""
    return agreement((problems[sample.problem_id], sample.rewards) for sample in samples)


def rubric_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """`rubric`: mean score of responses to prompts with a rubric. Empty if there are none."""
    scores = [sample.rewards["rubric"] for sample in samples if "rubric" in sample.rewards]
    return {"rubric": sum(scores) / len(scores)} if scores else {}


def _key(item: Verified, seed: int) -> int:
    text = json.dumps([seed, item.right, *item.claim])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
