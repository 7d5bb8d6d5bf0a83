"""Trainers of other projects that run a job in the place of this library's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from grpo.secret_values import is_secret_name
from grpo.settings import Settings


class MegatronSplit(Settings):
    """How verl's Megatron engine divides a model among processes. Not part of a stage's key."""

    tensor: int = Field(1, ge=1, description="Processes that share each matrix.")
    pipeline: int = Field(1, ge=1, description="Groups of processes, each with some of the layers.")
    context: int = Field(1, ge=1, description="Processes that share the tokens of each sequence.")
    expert: int = Field(1, ge=1, description="Processes that share the experts of a layer.")
    expert_tensor: int | None = Field(
        None, ge=1, description="Processes that share each expert's matrices. None: tensor."
    )
    offload: bool = Field(
        False, description="Keep weights and the optimizer's state in the machine's memory while they are not used."
    )

    @property
    def of_a_copy(self) -> int:
        """Processes that together hold one copy of the model and its sequences."""
        return self.tensor * self.pipeline * self.context


class Verl(Settings):
    """verl (https://github.com/volcengine/verl), an engine for SFT and RL of large models.

    It runs in an environment of its own, because it needs other versions of transformers than r1flow. `kind`,
    `version`, `strategy` and `options` are part of a stage's key, since results differ by more than rounding. Where it
    is and how it splits the model are not.
    """

    kind: Literal["verl"]
    python: Path = Field(
        description="The Python interpreter of an environment with verl, the same path on each machine, such as "
        "/opt/verl/bin/python."
    )
    version: str = Field("0.9.1", pattern=r"^\d+(\.\w+)*$", description="The version of verl that must be there.")
    strategy: Literal["fsdp2", "megatron"] = Field(
        "fsdp2",
        description="How verl splits the model: PyTorch's FSDP2, or Megatron, for models of hundreds of billions of "
        "weights.",
    )
    megatron: MegatronSplit | None = Field(
        None, exclude_if=lambda value: value is None, description="Of strategy 'megatron'."
    )
    options: list[str] = Field(
        [],
        description='Further settings in verl\'s own words, as "engine.param_offload=True". They come last, so they '
        "also change what is translated.",
    )

    @model_validator(mode="after")
    def _megatron_is_split(self) -> Verl:
        if (self.strategy == "megatron") != (self.megatron is not None):
            raise ValueError(
                "strategy 'megatron' and megatron = { tensor, pipeline, ... } go together; set both or none"
            )
        return self

    @field_validator("options")
    @classmethod
    def _are_settings(cls, options: list[str]) -> list[str]:
        for option in options:
            name, assigned, _ = option.partition("=")
            if not assigned or not name.strip():
                raise ValueError(f"{option!r} is no setting; write section.field=value")
            if is_secret_name(name):
                raise ValueError(f"{name} is a secret, which would be recorded; put it into an environment variable")
        return options


def check_translated(used: Mapping[str, bool]) -> None:
    """Raises ValueError for the first field that is used although it is not translated for verl."""
    for field in (field for field, is_used in used.items() if is_used):
        raise ValueError(f"hardware.trainer: {field} is not translated for verl; leave it out")


def check_even_shares(what: str, sequences: int, groups: int) -> None:
    """Raises ValueError if a batch of `what` cannot be divided among `groups` of processes."""
    if sequences % groups:
        raise ValueError(
            f"hardware.trainer: verl gives each copy of the model equally many sequences, but {what} ({sequences}) is "
            f"no multiple of {groups}"
        )
