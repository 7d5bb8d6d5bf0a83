"""Settings of validation: what is measured during training, and what depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from grpo.config.common import Sampling
from grpo.rewards.registry import MODEL_REWARDS
from grpo.settings import Settings

REWARD = "reward"
"""Metric of the weighted sum of all rewards."""

ValidateEvery = Annotated[
    int | None,
    Field(
        ge=1,
        exclude_if=lambda value: value is None,
        description="Steps between validations; the last step has one too. None: no validation.",
    ),
]
Keep = Annotated[
    Literal["best", "last"],
    Field(
        exclude_if=lambda value: value == "last",
        description="The checkpoint that the job gives: of the last step, or of the best validation.",
    ),
]
Patience = Annotated[
    int | None,
    Field(ge=1, description="Training ends after so many validations in a row that are no new best. None: never."),
]


class _Chosen(Settings):
    def check_chosen(self, every: int | None, keep: str) -> None:
        """Raises ValueError if validation settings are given but no validation takes place."""
        if every is None and (keep == "best" or self != type(self)()):
            raise ValueError("keep 'best' and validation need validate_every, the steps between validations")


class HeldOutValidation(_Chosen):
    """Loss per token of SFT on sequences that are never trained on; less is better. R1: unpublished."""

    share: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Share of the prompts, by their hash, that only measure. Data with a validation split of their own "
        "(sft_data.mix.validation_share) are measured on that, and all others are trained on. Ours.",
    )
    patience: Patience = None


class Validation(_Chosen):
    """Samples on problems that are never trained on. R1: unpublished."""

    problems: int = Field(64, ge=1, description="Most validation problems of each domain that is trained on. Ours.")
    samples_per_problem: int = Field(1, ge=1, description="Completions of each; metrics are means over all of them.")
    sampling: Sampling | None = Field(
        None, description="How they are sampled; R1 evaluates at temperature 0.6, top-p 0.95. None: as in training."
    )
    metric: str = Field(
        "accuracy",
        description="What `keep` and `patience` go by, more is better: 'reward', the weighted sum of all rewards, or "
        "the name of one of `rewards` (weight 0 measures it alone).",
    )
    patience: Patience = None

    def check(self, every: int | None, keep: str, method: str, rewards: Iterable[str]) -> None:
        """Raises ValueError if this does not fit the other settings of RL."""
        self.check_chosen(every, keep)
        if every is None:
            return
        if method not in ("grpo", "ppo", "online_rft"):
            raise ValueError(f"validate_every is for methods whose policy samples; method is {method!r}")
        elif self.metric not in (known := [REWARD, *rewards]) and self.metric not in MODEL_REWARDS:
            raise ValueError(f"validation.metric: no {self.metric!r} here; choose from {', '.join(known)}")
