"""Settings of problem sources, and the ids of their problems."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.data.records import Message, Problem
from grpo.data.template import AnswerStyle
from grpo.rewards.verifiers import VERIFIERS
from tasks.problems.worked_solutions import WRITERS

_LANGUAGE = r"^[a-z]{2,3}(-[A-Za-z]+)?$"


class StyledSource(BaseModel):
    """Common field of all sources."""

    model_config = ConfigDict(extra="forbid")

    answer_style: AnswerStyle | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="How answers to these problems are marked, instead of problems.answer_style. A row's own "
        "answer_style, kept by metadata_columns, overrides it. None: problems.answer_style.",
    )


class ReasoningGymSource(StyledSource):
    """Problems made by a reasoning-gym generator, with its own scorer as the verifier."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    family: str = Field(description="Name of a reasoning-gym dataset, e.g. chain_sum.")
    count: int = Field(
        ge=1, le=10_000_000, description="Problems to generate; duplicates are dropped, so fewer may remain."
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Generator settings, e.g. {min_terms: 2, max_digits: 2}; otherwise its own defaults. seed and "
        "size are set from the run's seed, seed_offset and count.",
    )
    seed_offset: int = Field(
        default=0, ge=0, description="Distinguishes sources of one family; each value gives an independent stream."
    )
    language: str = Field(
        default="en", pattern=_LANGUAGE, description="Language of the prompt and the expected reasoning: ISO 639."
    )
    prompt: str | None = Field(
        default=None,
        description="Python format string over the item's question and its metadata, e.g. chain_sum's {expression}, "
        "to rephrase or translate the problem. None: the question as generated.",
    )
    worked_solutions: bool = Field(
        default=False,
        exclude_if=lambda value: not value,
        description="Write a worked solution for each problem, in English, for cold_start_data.source 'solutions'. "
        f"Possible for {', '.join(WRITERS)}.",
    )

    @model_validator(mode="after")
    def _solutions_are_known(self) -> ReasoningGymSource:
        if self.worked_solutions and self.family not in WRITERS:
            raise ValueError(f"no worked solutions are written for {self.family}; known are {', '.join(WRITERS)}")
        return self


class _ColumnsSource(StyledSource):
    """Common fields of sources that consist of rows: the names of the columns."""

    prompt_column: str = Field(
        default="prompt",
        description="Column of the prompt: text, or a list of {role, content}. If the default is absent, 'question' "
        "and then 'messages' are tried.",
    )
    answer_column: str = Field(
        default="answer",
        description="Column of the reference answer: text or a number. From text whose last line is '#### 1,234' "
        "(GSM8K), 1234 is extracted. Not read for verifier none.",
    )
    verifier: str = Field(
        default="math",
        description=f"How answers are checked: {', '.join(VERIFIERS)}.",
        json_schema_extra={"enum": [*VERIFIERS]},  # the list of a form
    )
    domain: Literal["reasoning", "general"] = Field(
        default="reasoning", description="reasoning: verified by rule; general: scored by a reward model or a judge."
    )
    language: str = Field(default="en", pattern=_LANGUAGE, description="Language of the prompts: ISO 639.")
    metadata_columns: list[str] = Field(
        default_factory=list, description="Columns to keep as the problem's metadata; their values must be JSON."
    )
    verifier_column: str | None = Field(
        default=None, description="Column that names a row's own verifier; if it is blank, `verifier` applies."
    )
    limit: int | None = Field(default=None, ge=1, description="Rows to read, from the start. None: all.")
    on_bad_record: Literal["stop", "skip"] = Field(
        default="stop",
        description="How a row that cannot be read or checked is handled. stop: an error that names it, no output; "
        "skip: it is omitted, counted, and listed among the bad records of the artifact.",
    )

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, name: str) -> str:
        if name not in VERIFIERS:
            raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        return name

    @model_validator(mode="after")
    def _reasoning_is_verified(self) -> _ColumnsSource:
        if self.domain == "reasoning" and self.verifier == "none":
            raise ValueError("verifier 'none' is for domain 'general'; a reasoning problem needs one that checks")
        return self


class FileSource(_ColumnsSource):
    """One file of rows: .jsonl or .json (one object a line), .parquet or .csv (with a header)."""

    kind: Literal["file"] = "file"
    path: Path = Field(description="The file; its extension sets the format.")


class HubSource(_ColumnsSource):
    """A Hugging Face data set: a name on the hub, or a local folder."""

    kind: Literal["dataset"] = "dataset"
    name: str = Field(
        min_length=1,
        description="Hub name, e.g. openai/gsm8k, or a folder: written by save_to_disk, or with parquet, JSONL or CSV "
        "files.",
    )
    config: str | None = Field(default=None, description="The data set's configuration, e.g. main. None: its default.")
    split: str = Field(default="train", min_length=1, description="Which split to read.")


ProblemSource = Annotated[ReasoningGymSource | FileSource | HubSource, Field(discriminator="kind")]


def label(source: ReasoningGymSource | FileSource | HubSource) -> str:
    """`Problem.source`. For a file, its name without the folder, so that ids are the same on another machine."""
    match source:
        case ReasoningGymSource():
            return f"reasoning_gym/{source.family}"
        case FileSource():
            return f"file/{source.path.name}"
        case HubSource():
            name = Path(source.name).name if Path(source.name).is_dir() else source.name
            return "/".join(["dataset", name, *([source.config] if source.config else []), source.split])


def make_problem(source: str, messages: list[Message], answer: str, **rest: Any) -> Problem:
    """A problem whose id is a hash of its source, text and answer."""
    problem = Problem("", messages, answer, source=source, **rest)
    identity = json.dumps([source, problem.text, answer], ensure_ascii=False)
    return dataclasses.replace(problem, id=hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:16])


def short(value: Any) -> str:
    """A value as text of at most 80 characters, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
