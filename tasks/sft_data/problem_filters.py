"""Filters of whole problems: if a problem fails one, all of its samples are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from grpo.data.records import Problem, Sample
from tasks.problems.answer_leaks import states_answer
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.filters import FilterSettings, is_correct


class ProblemSamples(NamedTuple):
    """A problem, all of its samples, and the held-out problems that its prompt must not overlap with."""

    problem: Problem
    samples: Sequence[Sample]
    held_out: HeldOut | None = None


def leaked(entry: ProblemSamples, settings: FilterSettings) -> bool:
    """The prompt states the reference answer."""
    return settings.leaks and states_answer(entry.problem.text, entry.problem.answer)


def contaminated(entry: ProblemSamples, settings: FilterSettings) -> bool:
    """The prompt equals a held-out prompt, or shares a run of words with one."""
    return entry.held_out is not None and entry.held_out.match_prompt(entry.problem.text) is not None


def too_easy(entry: ProblemSamples, settings: FilterSettings) -> bool:
    """Nearly every sample is correct: there is little to learn from."""
    return settings.pass_rate_max < 1 and _rated(entry, settings) and pass_rate(entry) > settings.pass_rate_max


def too_hard(entry: ProblemSamples, settings: FilterSettings) -> bool:
    """Hardly any sample is correct, and the correct ones may be lucky guesses."""
    return settings.pass_rate_min > 0 and _rated(entry, settings) and pass_rate(entry) < settings.pass_rate_min


PROBLEM_FILTERS: dict[str, Callable[[ProblemSamples, FilterSettings], bool]] = {
    "too_easy": too_easy,
    "too_hard": too_hard,
    "leaked": leaked,
    "contaminated": contaminated,
}
"""In order of evaluation, cheap filters first. The first that matches is the reason for all of the problem's
samples."""


def reject_problem(entry: ProblemSamples, settings: FilterSettings) -> str | None:
    """Name of the first filter that matches, or None."""
    return next((name for name, is_bad in PROBLEM_FILTERS.items() if is_bad(entry, settings)), None)


def pass_rate(entry: ProblemSamples) -> float:
    """Share of correct answers among all samples, whatever else is wrong with them."""
    return sum(map(is_correct, entry.samples)) / len(entry.samples)


def _rated(entry: ProblemSamples, settings: FilterSettings) -> bool:
    return entry.problem.domain == "reasoning" and len(entry.samples) >= settings.pass_rate_samples
