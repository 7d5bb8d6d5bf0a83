"""Filters of whole problems: what they find wrong is wrong with every sample of the problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo.data.records import Problem, Sample
from tasks.problems.answer_leaks import states_answer
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.filters import FilterSettings, is_right


class Group(NamedTuple):
    """A problem, all its samples, and what no prompt may share words with."""

    problem: Problem
    samples: Sequence[Sample]
    held_out: HeldOut | None = None


def leaked(group: Group, settings: FilterSettings) -> bool:
    """The prompt states the reference answer."""
    return settings.leaks and states_answer(group.problem.text, group.problem.answer)


def contaminated(group: Group, settings: FilterSettings) -> bool:
    """The prompt equals a held-out one, or shares a run of words with one."""
    return group.held_out is not None and group.held_out.match_prompt(group.problem.text) is not None


def too_easy(group: Group, settings: FilterSettings) -> bool:
    """Nearly every sample is right: there is little to learn from it."""
    return settings.pass_rate_max < 1 and _rated(group, settings) and pass_rate(group) > settings.pass_rate_max


def too_hard(group: Group, settings: FilterSettings) -> bool:
    """Hardly a sample is right: those that are may be so by luck."""
    return settings.pass_rate_min > 0 and _rated(group, settings) and pass_rate(group) < settings.pass_rate_min


PROBLEM_FILTERS: dict[str, Callable[[Group, FilterSettings], bool]] = {
    "too_easy": too_easy,
    "too_hard": too_hard,
    "leaked": leaked,
    "contaminated": contaminated,
}
"""In the order asked, cheap ones first: the first that says yes is the reason of all the problem's samples."""


def reject_problem(group: Group, settings: FilterSettings) -> str | None:
    """The first filter that finds the problem bad, or None."""
    return next((name for name, is_bad in PROBLEM_FILTERS.items() if is_bad(group, settings)), None)


def pass_rate(group: Group) -> float:
    """Share of right ones among all samples, whatever else is wrong with them."""
    return sum(map(is_right, group.samples)) / len(group.samples)


def _rated(group: Group, settings: FilterSettings) -> bool:
    return group.problem.domain == "reasoning" and len(group.samples) >= settings.pass_rate_samples
