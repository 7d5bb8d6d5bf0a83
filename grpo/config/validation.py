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
        description="Steps between validations, plus one at the last step. None: no validation.",
    ),
]
Keep = Annotated[
    Literal["best", "last"],
    Field(
        exclude_if=lambda value: value == "last",
        description="Checkpoint that the job returns: from the last step, or the best validation.",
    ),
]
Patience = Annotated[
    int | None,
    Field(ge=1, description="Stop training after this many validations in a row without a new best. None: never."),
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
        description="Share of prompts, chosen by hash, used only for validation. Data with their own validation split "
        "(sft_data.mix.validation_share) use that, and all other prompts are trained on. Ours.",
    )
    patience: Patience = None


class Validation(_Chosen):
    """Samples on problems that are never trained on. R1: unpublished."""

    problems: int = Field(64, ge=1, description="Maximum validation problems per domain trained on. Ours.")
    samples_per_problem: int = Field(
        1, ge=1, description="Completions per problem; metrics are means over all of them."
    )
    sampling: Sampling | None = Field(
        None, description="How they are sampled; R1 evaluates at temperature 0.6, top-p 0.95. None: as in training."
    )
    metric: str = Field(
        "accuracy",
        description="Metric for `keep` and `patience`, higher is better: 'reward', the weighted sum of all rewards, or "
        "one of `rewards` by name (weight 0 only measures it).",
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
