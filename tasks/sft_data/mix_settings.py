"""Settings of the data mix: its parts and their sizes, and which examples keep their chain of thought."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.errors import InputError
from tasks.sft_data.given.settings import MixSource

NO_PART = ""
"""Name for samples that belong to no part."""


class Part(BaseModel):
    """One part of the data set: the sources of its examples, and their number."""

    model_config = ConfigDict(extra="forbid")

    sources: list[str] = Field(
        default_factory=list,
        description="Sources of its problems: names such as dataset/openai/gsm8k/main/train, or patterns such as "
        "reasoning_gym/*. Parts with sources take precedence over parts with domains.",
    )
    domains: list[Literal["reasoning", "general"]] = Field(
        default_factory=list, description="Instead of sources: all samples of these domains whose source no part names."
    )
    share: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Size relative to the other parts' shares, which need not sum to 1. Only with total.",
    )
    count: int | None = Field(
        default=None, ge=0, description="Size in examples, regardless of the total; instead of share."
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> Part:
        if bool(self.sources) == bool(self.domains):
            raise ValueError("a part needs sources or domains, not both")
        if self.share is not None and self.count is not None:
            raise ValueError("give share or count, not both")
        return self


def _both_domains() -> dict[str, Part]:
    # The paper's totals: 626,933 reasoning, 177,812 general.
    return {
        "reasoning": Part(domains=["reasoning"], share=626_933),
        "general": Part(domains=["general"], share=177_812),
    }


class MixSettings(BaseModel):
    """How the filtered samples become a data set."""

    model_config = ConfigDict(extra="forbid")

    parts: dict[str, Part] = Field(
        default_factory=_both_domains,
        min_length=1,
        description="Parts by name. Samples in no part are dropped, with the reason no_part.",
    )
    total: int | None = Field(
        default=None,
        ge=1,
        description="Total examples, training and validation. A part with too few gives all it has: the shortage is "
        "reported, not filled from other parts. None: all there is; shares are ignored, counts hold.",
    )
    validation_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each part's examples in each language that is held out of training. A prompt's examples "
        "stay together, so a stratum may hold out a few more.",
    )
    think: Literal["always", "never"] | list[str] = Field(
        default="always",
        description="General examples that keep their chain of thought: all, none, or those of these sources (names "
        "or patterns); the others train on the summary only. Reasoning examples always keep it. R1: simple prompts "
        "have none.",
    )
    licences: dict[str, str] = Field(
        default_factory=dict,
        description="License of each source, by name or pattern, for the data card; unlisted ones are unknown.",
    )
    examples: int = Field(default=3, ge=0, le=100, description="Samples that the card shows per part and reason.")
    sources: list[MixSource] = Field(
        default_factory=list,
        exclude_if=lambda sources: not sources,  # if empty, not in records and keys, so that earlier keys stay valid
        description="Existing SFT rows, besides the sampled ones. They pass the same filters. R1: general data from "
        "DeepSeek-V3's SFT set.",
    )

    @property
    def all_parts(self) -> dict[str, Part]:
        """The parts, plus one for each source that has a count or a share."""
        own = [source for source in self.sources if source.count is not None or source.share is not None]
        return self.parts | {s.name: Part(sources=[s.name], count=s.count, share=s.share) for s in own}

    @field_validator("parts")
    @classmethod
    def _parts_are_told_apart(cls, parts: dict[str, Part]) -> dict[str, Part]:
        for name in parts:
            if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ValueError(f"part name {name!r}: use letters, digits, '-', '_' and '.'")
        for what in ("domains", "sources"):
            named = [value for part in parts.values() for value in getattr(part, what)]
            if twice := sorted({value for value in named if named.count(value) > 1}):
                raise ValueError(f"{what}: {twice[0]!r} is in two parts")
        return parts

    @model_validator(mode="after")
    def _sources_are_told_apart(self) -> MixSettings:
        names = [source.name for source in self.sources]
        places = [(str(source.place), source.config, source.split) for source in self.sources]
        for number, source in enumerate(self.sources):
            if source.name in names[:number]:
                raise ValueError(f"two mix sources are called {source.name!r}; give each a name of its own")
            if places[number] in places[:number]:
                first = names[places.index(places[number])]
                raise ValueError(f"mix sources {first!r} and {source.name!r} are both {source.place}; remove one")
            if source.count is None and source.share is None:
                continue
            if source.name in self.parts:
                raise ValueError(f"mix source {source.name!r} has the name of a part; rename one of them")
            if named := [name for name, part in self.parts.items() if matches(source.name, part.sources)]:
                raise ValueError(
                    f"mix source {source.name!r} has a size of its own, but part {named[0]!r} names it; remove one"
                )
        return self

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> MixSettings:
        if self.total is None:
            return self
        parts = self.all_parts
        if unsized := [name for name, part in parts.items() if part.share is None and part.count is None]:
            raise ValueError(f"part {unsized[0]!r} needs share or count, because total is {self.total}")
        if (fixed := sum(part.count or 0 for part in parts.values())) > self.total:
            raise ValueError(f"the parts' counts add up to {fixed}, more than the total {self.total}")
        return self

    def size(self, sampled: float) -> float:
        """Total number of examples if `sampled` sampled ones are kept and each source of known size contributes all it
        has."""
        given = sum(source.count or source.limit or 0 for source in self.sources)
        return sampled + given if self.total is None else min(sampled + given, self.total)

    def wanted(self) -> dict[str, int | None]:
        """Number of examples wanted of each part; None: all. Shares are rounded by the largest remainder method."""
        parts = self.all_parts
        if self.total is None:
            return {name: part.count for name, part in parts.items()}
        sizes: dict[str, int | None] = {name: part.count for name, part in parts.items() if part.count is not None}
        shares = {name: part.share or 0.0 for name, part in sorted(parts.items()) if part.count is None}
        left, whole = self.total - sum(size or 0 for size in sizes.values()), math.fsum(shares.values())
        exact = {name: share * left / whole if whole else 0.0 for name, share in shares.items()}
        floors = {name: math.floor(size) for name, size in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (floors[name] - exact[name], name))
        missing = left - sum(floors.values()) if whole else 0
        sizes |= {name: floors[name] + (name in by_remainder[:missing]) for name in shares}
        return {name: sizes[name] for name in parts}

    def part_of(self, source: str, domain: str) -> str:
        """The part that a sample belongs to, or NO_PART. Does not depend on the order of the parts."""
        parts = self.all_parts
        named = sorted(name for name, part in parts.items() if matches(source, part.sources))
        if len(named) > 1:
            raise InputError(f"mix: source {source!r} is in parts {named[0]!r} and {named[1]!r}; name it in one")
        of_domain = (name for name, part in parts.items() if domain in part.domains)
        return named[0] if named else next(of_domain, NO_PART)

    def keeps_thought(self, source: str, domain: str) -> bool:
        if domain != "general" or self.think == "always":
            return True
        return self.think != "never" and matches(source, self.think)

    def licence(self, source: str) -> str:
        """The licence given for a source, or "unknown". An exact name takes precedence over a pattern."""
        if of_source := next((s.licence for s in self.sources if s.name == source and s.licence), None):
            return of_source
        fitting = sorted((name != source, -len(name), name) for name in self.licences if matches(source, [name]))
        return self.licences[fitting[0][2]] if fitting else "unknown"


def matches(source: str, names: Iterable[str]) -> bool:
    """Whether one of the names equals the source's name, or is a pattern that matches it (* ? [abc])."""
    return any(source == name or fnmatchcase(source, name) for name in names)
