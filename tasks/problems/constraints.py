"""Constraints on a response that a program can check, as in IFEval (arXiv 2311.07911).

A general prompt such as "name three rivers, as a list" states its demands in its metadata:

    {"constraints": [{"kind": "bullets", "min": 3, "max": 3}, {"kind": "language", "language": "de"}]}

Words are separated by spaces. Case is ignored everywhere except in JSON. Fields that are said to be IFEval's count as
its own program does; its prompts set them, and other prompts need not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from grpo.errors import InputError
from grpo.rewards.language import check_language, language_consistency

_BULLET = re.compile(r"^[^\S\n]*+(?:[-*•]|\d++[.)])[^\S\n]++\S", re.MULTILINE)
# Lines that IFEval takes for bullets: "**bold**" is none, "---" is one.
_STAR = re.compile(r"^[^\S\n]*+\*[^*].*", re.MULTILINE)
_DASH = re.compile(r"^[^\S\n]*+-", re.MULTILINE)
_RUN = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++(?:\s|\Z)")
_FENCE = re.compile(r"```(?:json)?[^\S\n]*+\n")
_FENCE_MARKS = ("```json", "```Json", "```JSON", "```")


class _Constraint(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Count(_Constraint):
    min: int = Field(0, ge=0, description="At least so many.")
    max: int | None = Field(None, ge=0, description="At most so many. None: no limit.")

    @model_validator(mode="after")
    def _demands_something(self) -> _Count:
        if self.min == 0 and self.max is None:
            raise ValueError("give min, max or both")
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self

    def holds(self, number: int) -> bool:
        return self.min <= number and (self.max is None or number <= self.max)


class Words(_Count):
    """The number of words is in a range."""

    kind: Literal["words"] = "words"
    runs: bool = Field(
        False, description="Count runs of letters, digits and underscores: two in \"don't\". IFEval's count."
    )


class Sentences(_Count):
    """The number of sentences is in a range; a full stop, question mark or exclamation mark ends one."""

    kind: Literal["sentences"] = "sentences"


class Bullets(_Count):
    """The number of lines that begin with a bullet or a number is in a range: "- x", "* x", "1. x"."""

    kind: Literal["bullets"] = "bullets"
    markdown: bool = Field(False, description="Count lines that begin with * or -, no others. IFEval's count.")


class Includes(_Constraint):
    """Contains all of these words or phrases, as whole words."""

    kind: Literal["includes"] = "includes"
    words: list[str] = Field(min_length=1)
    whole: bool = Field(True, description="false: parts of words count too, as in IFEval.")


class Excludes(_Constraint):
    """Contains none of these words or phrases, as a whole word."""

    kind: Literal["excludes"] = "excludes"
    words: list[str] = Field(min_length=1)


class StartsWith(_Constraint):
    """Begins with this text."""

    kind: Literal["starts_with"] = "starts_with"
    text: str = Field(min_length=1)


class EndsWith(_Constraint):
    """Ends with this text."""

    kind: Literal["ends_with"] = "ends_with"
    text: str = Field(min_length=1)
    quoted: bool = Field(False, description="Quotation marks around the response may follow the text, as in IFEval.")


class Language(_Constraint):
    """The share of its words in this language (grpo/rewards/language.py) is at least `share`."""

    kind: Literal["language"] = "language"
    language: str = Field(pattern=r"^[a-z]{2}$")
    share: float = Field(0.8, gt=0, le=1)

    @field_validator("language")
    @classmethod
    def _can_be_recognized(cls, language: str) -> str:
        check_language(language)  # here, since a metric that fails wastes what was sampled for it
        return language


class Json(_Constraint):
    """Is one JSON value; a Markdown fence around it is allowed."""

    kind: Literal["json"] = "json"
    keys: list[str] = Field([], description="Keys that the value, an object then, must have.")
    any_fence: bool = Field(
        False, description="Ignore a fence's marks even at one end or on the value's line (IFEval)."
    )


Constraint = Annotated[
    Words | Sentences | Bullets | Includes | Excludes | StartsWith | EndsWith | Language | Json,
    Field(discriminator="kind"),
]
_CONSTRAINTS: TypeAdapter[list[Constraint]] = TypeAdapter(list[Constraint])


def read_constraints(metadata: dict[str, Any]) -> list[Constraint]:
    """The constraints in a problem's metadata; an empty list if it has none.

    Raises:
        InputError: a constraint is unknown or incomplete; the caller adds its place.
    """
    values = metadata.get("constraints") or []
    if isinstance(values, list):  # in parquet, each row has the fields of all rows, null if absent
        values = [{k: v for k, v in c.items() if v is not None} if isinstance(c, dict) else c for c in values]
    try:
        return _CONSTRAINTS.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in ("constraints", *first["loc"]))
        raise InputError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def satisfied(constraint: Constraint, response: str) -> bool:
    """Whether the response satisfies the constraint. An empty response satisfies none, not even `excludes`."""
    return bool(response.strip()) and _CHECKS[constraint.kind](constraint, response.strip())


def share_satisfied(constraints: list[Constraint], response: str) -> float:
    """Share of the constraints that the response satisfies, in [0, 1]. Needs at least one constraint."""
    return sum(satisfied(constraint, response) for constraint in constraints) / len(constraints)


def _sentences(text: str) -> int:
    return len([part for part in _SENTENCE_END.split(text) if part.strip()])


def _words(constraint: Words, text: str) -> int:
    return sum(1 for _ in _RUN.finditer(text)) if constraint.runs else len(text.split())


def _bullets(constraint: Bullets, text: str) -> int:
    patterns = (_STAR, _DASH) if constraint.markdown else (_BULLET,)
    return sum(len(pattern.findall(text)) for pattern in patterns)


def _holds(word: str, text: str, whole: bool = True) -> bool:
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)" if whole else re.escape(word)
    return re.search(pattern, text, re.IGNORECASE) is not None


def _ends(constraint: EndsWith, text: str) -> bool:
    return (text.strip('"') if constraint.quoted else text).lower().endswith(constraint.text.lower())


def _unfenced(text: str, any_fence: bool) -> str:
    if any_fence:
        for mark in _FENCE_MARKS:
            text = text.removeprefix(mark)
        return text.removesuffix("```")
    fence = _FENCE.match(text)
    return text[fence.end() :].removesuffix("```") if fence and text.endswith("```") else text


def _is_json(constraint: Json, text: str) -> bool:
    try:
        value = json.loads(_unfenced(text, constraint.any_fence))
    except (ValueError, RecursionError):
        return False
    return not constraint.keys or (isinstance(value, dict) and set(constraint.keys) <= value.keys())


_CHECKS: dict[str, Callable[[Any, str], bool]] = {
    "words": lambda c, text: c.holds(_words(c, text)),
    "sentences": lambda c, text: c.holds(_sentences(text)),
    "bullets": lambda c, text: c.holds(_bullets(c, text)),
    "includes": lambda c, text: all(_holds(word, text, c.whole) for word in c.words),
    "excludes": lambda c, text: not any(_holds(word, text) for word in c.words),
    "starts_with": lambda c, text: text.lower().startswith(c.text.lower()),
    "ends_with": _ends,
    "language": lambda c, text: language_consistency(text, c.language) >= c.share,
    "json": _is_json,
}
