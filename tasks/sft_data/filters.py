"""Filters that reject single samples, each named after its reason.

The paper names wrong answers, mixed languages, overlong paragraphs and code blocks in the reasoning. Truncation,
length, format and repetition are also checked, because such samples are unusable. The paper publishes no thresholds;
those below are ours. Filters of whole problems are in tasks/sft_data/problem_filters.py; comparison of samples with
each other is in tasks/sft_data/rejection.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo.data.records import Sample
from grpo.errors import InputError
from grpo.rewards.text import repeated_ngram_share


class FilterSettings(BaseModel):
    """Thresholds of the filters. A sample exactly at a threshold is kept, except for near duplicates."""

    model_config = ConfigDict(extra="forbid")

    context: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of prompt plus completion: what SFT can read. None: no limit. R1: 32,768.",
    )
    language_min: float = Field(
        default=0.9, ge=0, le=1, description="Minimum language reward: share of words in the problem's language."
    )
    paragraph_max_words: int = Field(
        default=300,
        ge=1,
        le=1_000_000,
        description="Maximum words in a paragraph of the reasoning; characters in scripts without spaces.",
    )
    repetition_ngram: int = Field(
        default=6,
        ge=1,
        le=100,
        description="Length of the n-grams for repetition, in words, numbers and symbols.",
    )
    repetition_max: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="Maximum share of the completion's n-grams that are repeats. Degenerate loops are above 0.8, "
        "orderly calculation mostly below 0.2.",
    )
    leaks: bool = Field(
        default=True,
        description="Drop problems whose prompt states the reference answer. Turn off for prompts that show the "
        "format with a possible answer, as in: reply like \\boxed{A}.",
    )
    contamination: Literal["prompts", "prompts_and_completions"] = Field(
        default="prompts_and_completions",
        description="What is compared with held-out prompts. A completion may quote one even if its prompt does not.",
    )
    pass_rate_min: float = Field(
        default=0,
        ge=0,
        le=1,
        description="Minimum share of correct samples per reasoning problem; below it, all are dropped. 0: no limit.",
    )
    pass_rate_max: float = Field(
        default=1,
        ge=0,
        le=1,
        description="Maximum share of correct samples per reasoning problem; above it, all are dropped. 1: no limit.",
    )
    pass_rate_samples: int = Field(
        default=4,
        ge=1,
        description="Minimum samples for a pass rate; problems with fewer count as neither easy nor hard.",
    )
    near_duplicate_jaccard: float | None = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Two completions are near duplicates from this Jaccard similarity of their shingle sets on. None: "
        "none are.",
    )
    shingle_words: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Consecutive words per shingle; characters in scripts without spaces.",
    )

    @model_validator(mode="after")
    def _rates_leave_room(self) -> FilterSettings:
        if self.pass_rate_min > self.pass_rate_max:
            raise ValueError(f"pass_rate_min {self.pass_rate_min} is above pass_rate_max {self.pass_rate_max}")
        return self


_OF_GROUPS = (
    *("contamination", "pass_rate_min", "pass_rate_max", "pass_rate_samples"),
    *("near_duplicate_jaccard", "shingle_words"),
)
"""Fields that need many samples of a problem, and the choice not to compare completions with held-out prompts."""


def _without_groups(schema: dict[str, Any]) -> None:
    for name in _OF_GROUPS:
        del schema["properties"][name]


class DemonstrationFilters(FilterSettings):
    """Filters of cold-start demonstrations: one for each of few problems. Refuses settings that have no effect on them.
    They remain part of records, as before, and are left out of forms."""

    model_config = ConfigDict(json_schema_extra=_without_groups)

    leaks: bool = Field(
        default=True,
        description="Has no effect: demonstrations are not dropped because of their prompts.",
    )

    @model_validator(mode="after")
    def _has_an_effect(self) -> DemonstrationFilters:
        for name in _OF_GROUPS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect on cold-start demonstrations; leave it out")
        self.model_fields_set.difference_update(_OF_GROUPS)  # forms, in which they are missing, refuse what is set
        return self


def truncated(sample: Sample, settings: FilterSettings) -> bool:
    """It reached the token limit."""
    return sample.finish_reason == "length"


def too_long(sample: Sample, settings: FilterSettings) -> bool:
    """Prompt and completion together exceed the context of the model to be trained."""
    return settings.context is not None and sample.prompt_tokens + sample.tokens > settings.context


def malformed(sample: Sample, settings: FilterSettings) -> bool:
    """Its reasoning or its answer is not where the format requires it."""
    return _reward(sample, "format") < 1


def incorrect(sample: Sample, settings: FilterSettings) -> bool:
    """A reasoning problem's answer is wrong or only partly correct. General prompts have no correct answer."""
    return sample.domain == "reasoning" and not is_correct(sample)


def mixed_language(sample: Sample, settings: FilterSettings) -> bool:
    """Too much of its reasoning is in a different language from the problem's."""
    return _reward(sample, "language") < settings.language_min


def overlong_paragraph(sample: Sample, settings: FilterSettings) -> bool:
    """A paragraph of the reasoning (text between blank lines) is too long to read."""
    most = settings.paragraph_max_words
    # A paragraph has no more words than characters, so the words of most need not be counted.
    return any(len(p) > most and len(words_of(p)) > most for p in re.split(r"\n\s*\n", sample.reasoning))


def code_in_reasoning(sample: Sample, settings: FilterSettings) -> bool:
    """A fenced code block in the reasoning. It is allowed in the summary."""
    return "```" in sample.reasoning


def repetition(sample: Sample, settings: FilterSettings) -> bool:
    """The completion repeats itself."""
    return repeated_ngram_share(sample.completion, settings.repetition_ngram) > settings.repetition_max


FILTERS: dict[str, Callable[[Sample, FilterSettings], bool]] = {
    "truncated": truncated,
    "too_long": too_long,
    "malformed": malformed,
    "incorrect": incorrect,
    "mixed_language": mixed_language,
    "overlong_paragraph": overlong_paragraph,
    "code_in_reasoning": code_in_reasoning,
    "repetition": repetition,
}
"""In order of evaluation, cheap filters first. The first that matches is the reason."""


def reject(sample: Sample, settings: FilterSettings) -> str | None:
    """Name of the first filter that matches, or None."""
    return next((name for name, is_bad in FILTERS.items() if is_bad(sample, settings)), None)


def is_correct(sample: Sample) -> bool:
    """Whether the answer earned full accuracy. Raises InputError if the sample has no accuracy score."""
    return _reward(sample, "accuracy") >= 1


_IDEOGRAPH = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\s{_IDEOGRAPH}]+")


def words_of(text: str) -> list[str]:
    """Lower-case words, separated by white space. In scripts without spaces, each character is a word."""
    return _WORD.findall(text.lower())


def _reward(sample: Sample, name: str) -> float:
    if name not in sample.rewards:
        raise InputError(
            f"a sample of problem {sample.problem_id} has no reward {name!r} (it has "
            f"{', '.join(sorted(sample.rewards)) or 'none'}); score samples for {name} before filtering"
        )
    return sample.rewards[name]
