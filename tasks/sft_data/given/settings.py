"""Settings of a mix source: a set of SFT rows made by someone else."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo.rewards.verifiers import VERIFIERS


class MixSource(BaseModel):
    """SFT rows that exist already, such as R1's 200k general ones out of DeepSeek-V3's SFT set (R1, stage 3a).

    A row has `messages` (the last one is the assistant's), ShareGPT's `conversations`, or `prompt` and `completion`,
    each of them text or a list of messages.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$", description="Its name in parts, data card and columns.")
    path: Path | None = Field(
        None,
        description="A .jsonl, .json, .parquet or .csv file, or a folder: written by save_to_disk, or with such "
        "files. Its contents enter the stage's key. Exactly one of path and dataset.",
    )
    dataset: str | None = Field(None, min_length=1, description="Name on the Hugging Face hub, e.g. allenai/tulu-3.")
    config: str | None = Field(None, description="The data set's configuration. None: its default.")
    split: str = Field("train", min_length=1, description="Which split of a data set or folder to read.")
    limit: int | None = Field(None, ge=1, description="Rows to read, from the start. None: all.")
    count: int | None = Field(None, ge=0, description="Examples to use, as a part of its own; instead of share.")
    share: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Size relative to the parts' shares, as a part of its own. Without count and share it belongs to "
        "the part that names it or its domain.",
    )
    prompt_column: str | None = Field(None, description="Column of the prompt. None: found by common names.")
    completion_column: str | None = Field(None, description="Column of the completion; required with prompt_column.")
    domain: Literal["general", "reasoning"] = Field(
        "general", description="reasoning: rows are verified against their reference answers, and wrong ones dropped."
    )
    answer_column: str | None = Field(None, description="Column of the reference answer (reasoning only).")
    verifier: str = Field(
        "math",
        description=f"How answers are checked (reasoning only): {', '.join(VERIFIERS)}.",
        json_schema_extra={"enum": [*VERIFIERS]},  # the list of a form
    )
    language: str = Field("en", pattern=r"^[a-z]{2,3}(-[A-Za-z]+)?$", description="Language of its rows: ISO 639.")
    licence: str | None = Field(None, min_length=1, description="Its license, for the data card. None: unknown.")
    judged: bool = Field(
        False, description="Whether the judge checks it, as sft_data.judged says. false: only rules filter it."
    )
    on_bad_record: Literal["stop", "skip"] = Field(
        "stop",
        description="How an unusable row is handled. stop: an error that names it; skip: it is omitted, counted, and "
        "listed among the bad records of the artifact.",
    )

    @field_validator("verifier")
    @classmethod
    def _known_verifier(cls, name: str) -> str:
        if name not in VERIFIERS or name in ("none", "code"):
            raise ValueError(f"verifier {name!r} checks no given row; take math, number, choice or exact")
        return name

    @model_validator(mode="after")
    def _fields_go_together(self) -> MixSource:
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"mix source {self.name!r}: give either path or dataset")
        if self.count is not None and self.share is not None:
            raise ValueError(f"mix source {self.name!r}: give count or share, not both")
        if (self.prompt_column is None) != (self.completion_column is None):
            raise ValueError(f"mix source {self.name!r}: give prompt_column and completion_column, or neither")
        if (self.domain == "reasoning") != (self.answer_column is not None):
            raise ValueError(f"mix source {self.name!r}: answer_column belongs to domain 'reasoning', which needs it")
        return self

    @property
    def place(self) -> Path | str:
        """The local file or folder, or the hub name."""
        return self.path if self.path is not None else str(self.dataset)
