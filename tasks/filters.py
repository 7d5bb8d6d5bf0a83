"""Rejection: which sampled completions do not become training data, and for which reason.

The paper names wrong answers, mixed languages, overlong paragraphs and code blocks in the reasoning; truncation,
format and repetition are checked because such samples are unusable. It publishes no threshold: those below are ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from pydantic import BaseModel, ConfigDict, Field

from grpo.data import Sample
from grpo.errors import InputError


class FilterSettings(BaseModel):
    """Thresholds of the filters; a sample at a threshold is kept."""

    model_config = ConfigDict(extra="forbid")

    language_min: float = Field(
        default=0.9, ge=0, le=1, description="Least language reward: share of words in the problem's language."
    )
    paragraph_max_words: int = Field(
        default=300,
        ge=1,
        le=1_000_000,
        description="Most words in one paragraph of the reasoning; in scripts without spaces, characters.",
    )
    repetition_ngram: int = Field(default=6, ge=1, le=100, description="Words in the n-grams that repetition counts.")
    repetition_max: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Greatest share of the completion's n-grams that occurred before in it. Degenerate loops are above "
        "0.8, orderly calculation mostly below 0.2.",
    )


def truncated(sample: Sample, settings: FilterSettings) -> bool:
    """It ran into the token limit."""
    return sample.finish_reason == "length"


def malformed(sample: Sample, settings: FilterSettings) -> bool:
    """Reasoning or answer are not where the format wants them."""
    return _reward(sample, "format") < 1


def incorrect(sample: Sample, settings: FilterSettings) -> bool:
    """A reasoning problem's answer is wrong, or right in part; general prompts have no right answer."""
    return sample.domain == "reasoning" and _reward(sample, "accuracy") < 1


def mixed_language(sample: Sample, settings: FilterSettings) -> bool:
    """Too much of the reasoning is in another language than the problem's."""
    return _reward(sample, "language") < settings.language_min


def overlong_paragraph(sample: Sample, settings: FilterSettings) -> bool:
    """A paragraph of the reasoning, between blank lines, that nobody would read."""
    return any(len(_words(p)) > settings.paragraph_max_words for p in re.split(r"\n\s*\n", sample.reasoning))


def code_in_reasoning(sample: Sample, settings: FilterSettings) -> bool:
    """A fenced code block in the reasoning; in the summary it is welcome."""
    return "```" in sample.reasoning


def repetition(sample: Sample, settings: FilterSettings) -> bool:
    """The completion goes round in circles."""
    return repeated_share(sample.completion, settings.repetition_ngram) > settings.repetition_max


FILTERS: dict[str, Callable[[Sample, FilterSettings], bool]] = {
    "truncated": truncated,
    "malformed": malformed,
    "incorrect": incorrect,
    "mixed_language": mixed_language,
    "overlong_paragraph": overlong_paragraph,
    "code_in_reasoning": code_in_reasoning,
    "repetition": repetition,
}
"""In the order asked: the first that says yes is the reason."""


def reject(sample: Sample, settings: FilterSettings) -> str | None:
    """The first filter that finds the sample bad, or None."""
    return next((name for name, is_bad in FILTERS.items() if is_bad(sample, settings)), None)


def funnel(reasons: Iterable[str | None]) -> dict[str, int]:
    """Counts of what `reject` returned, in the filters' order: sampled = the sum of all reasons + kept."""
    counts = Counter(reasons)
    if unknown := [reason for reason in counts if reason is not None and reason not in FILTERS]:
        raise InputError(f"unknown reason {unknown[0]!r}; known are {', '.join(FILTERS)}")
    return {"sampled": counts.total(), **{name: counts[name] for name in FILTERS}, "kept": counts[None]}


def repeated_share(text: str, n: int) -> float:
    """Share of word n-grams that occurred before in the text: 0 where all differ, towards 1 in a loop."""
    words = _words(text)
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _reward(sample: Sample, name: str) -> float:
    if name not in sample.rewards:
        raise InputError(
            f"a sample of problem {sample.problem_id} has no reward {name!r} (it has "
            f"{', '.join(sorted(sample.rewards)) or 'none'}); score samples for {name} before filtering"
        )
    return sample.rewards[name]
