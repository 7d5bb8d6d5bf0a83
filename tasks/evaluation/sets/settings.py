"""Settings of test sets: what a set contains, and how its questions are put to a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.config.common import Sampling
from grpo.data.template import AnswerStyle
from tasks.evaluation.sets.known import KNOWN, KnownSet
from tasks.problems.sources import FileSource, HubSource, ProblemSource

PROMPT_STYLES = ("question", "instruction")
SIZE = 500
"""Assumed number of problems of a set of unknown size."""
FILES = (".jsonl", ".json", ".parquet", ".csv")
UNGRADED = (
    "verifiers check domain 'reasoning' only, and this is {domain!r} without constraints; set the source's domain to "
    "'reasoning' with a verifier, or keep its column constraints with metadata_columns"
)

NO_CONSTRAINTS = (
    "it has no constraints, and verifiers check domain 'reasoning' only; give it some in the column constraints, which "
    "metadata_columns keeps, or leave the row out"
)


class SetData(BaseModel):
    """A test set: a known one by its name, in a file or from the hub, or any source with its own columns."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w-]*$",
        description=f"Names its rows in tables. A known set needs nothing else: {', '.join(KNOWN)}.",
    )
    like: str | None = Field(None, description="Known set whose columns it has. None: the set of its own name.")
    path: str | None = Field(
        None,
        min_length=1,
        description="Location of its rows, instead of the known hub data set: a .jsonl, .json, .parquet or .csv file, "
        "a folder, or a hub name.",
    )
    source: ProblemSource | None = Field(
        None,
        description="A source with its own columns and verifier, instead of a known set's: kind file, dataset (with "
        "the split to read) or reasoning_gym.",
    )

    @field_validator("path")
    @classmethod
    def _with_one_spelling(cls, path: str | None) -> str | None:
        """./a.jsonl as a.jsonl, as `local` has it."""
        return str(Path(path)) if path is not None and path.lower().endswith(FILES) else path

    @model_validator(mode="after")
    def _one_origin(self) -> SetData:
        if self.source is not None:
            if self.path is not None or self.like is not None:
                raise ValueError(f"set {self.name!r}: source says where its rows are; leave path and like out")
            return self
        shape = self.like or self.name
        if shape not in KNOWN:
            close = difflib.get_close_matches(shape.lower(), KNOWN, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            known = ", ".join(KNOWN)
            raise ValueError(
                f"unknown test set {shape!r}; {hint}known are {known}; for any other give like (the known set whose "
                "columns it has) or source"
            )
        if self.path is None and KNOWN[shape].hub is None:
            raise ValueError(f"set {self.name!r}: {shape} has no data set on the hub; give path, a file of its rows")
        return self

    @property
    def known(self) -> KnownSet | None:
        """The table entry whose form the set's rows have; None if the set has its own source."""
        return None if self.source is not None else KNOWN[self.like or self.name]

    @property
    def local(self) -> str | Path | None:
        """The local file or folder, or the hub name, that the user gave. A file is a `Path` and must exist."""
        if self.source is None:
            is_file = self.path is not None and self.path.lower().endswith(FILES)
            return Path(self.path) if self.path is not None and is_file else self.path
        if isinstance(self.source, FileSource):
            return self.source.path
        return self.source.name if isinstance(self.source, HubSource) else None


class EvaluationSet(SetData):
    """A test set, and how it is asked."""

    problems: int | None = Field(None, ge=1, description="Problems to use, from the start. None: all.")
    samples_per_problem: int | None = Field(
        None, ge=1, description="Samples per problem. None: evaluate.samples_per_problem. R1: 64 for AIME and GPQA."
    )
    k: int | None = Field(None, ge=1, description="k of pass@k and cons@k. None: the number of samples.")
    prompt_style: str = Field(
        "question",
        description="question: unchanged, for models that were trained on it. instruction: followed by a sentence on "
        "reasoning and on how to mark the answer. Or a text that contains {question}.",
    )
    answer_style: AnswerStyle | None = Field(
        None,
        description="How completions mark the answer: tags, boxed or auto. None: as in problems.",
    )
    sampling: Sampling | None = Field(None, description="Sampling settings. None: evaluate.sampling.")

    @field_validator("prompt_style")
    @classmethod
    def _has_a_question(cls, style: str) -> str:
        if style not in PROMPT_STYLES and "{question}" not in style:
            raise ValueError(
                f"prompt_style is {style!r}; give question, instruction, or a text with {{question}} in it"
            )
        return style

    @model_validator(mode="after")
    def _can_be_graded(self) -> EvaluationSet:
        # Here and not only before the questions are asked: until then, days of training may pass.
        domain = getattr(self.source, "domain", "reasoning")
        if domain != "reasoning" and "constraints" not in getattr(self.source, "metadata_columns", ()):
            raise ValueError(f"set {self.name!r}: {UNGRADED.format(domain=domain)}")
        return self

    @property
    def data(self) -> SetData:
        """The set's data, without the sampling settings."""
        return SetData(**{name: getattr(self, name) for name in SetData.model_fields})

    @property
    def size(self) -> int:
        """Maximum number of problems to ask, for an estimate: from the settings, or the published size of a known
        set."""
        limits = [self.problems, getattr(self.source, "count", None), getattr(self.source, "limit", None)]
        given = [limit for limit in (*limits, self.known.problems if self.known else None) if limit is not None]
        return min(given, default=SIZE)

    def samples(self, default: int) -> int:
        """Number of samples per problem."""
        return self.samples_per_problem or default


def check_names(sets: Sequence[SetData]) -> None:
    """Raises ValueError if two sets have the same name."""
    names = [of.name for of in sets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two test sets are called {twice[0]!r}; give each a name of its own, and like for its columns"
        )


def check_sets(sets: Sequence[EvaluationSet], samples_per_problem: int) -> None:
    """Raises ValueError if two sets have the same name, or if k exceeds the samples per problem."""
    check_names(sets)
    for of in sets:
        if of.k is not None and of.k > of.samples(samples_per_problem):
            raise ValueError(
                f"set {of.name!r}: k is {of.k}, above its {of.samples(samples_per_problem)} samples a problem; lower k "
                "or raise samples_per_problem"
            )
