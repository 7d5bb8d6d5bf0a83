"""Settings of validation: what is measured while a policy learns, and what it decides."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from grpo.config.common import Sampling
from grpo.rewards.registry import MODEL_REWARDS
from grpo.settings import Settings

REWARD = "reward"
"""Metric of the weighted sum of all rewards."""


class Validation(Settings):
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
    patience: int | None = Field(
        None, ge=1, description="Training ends after so many validations in a row that are no new best. None: never."
    )

    def check(self, every: int | None, keep: str, method: str, rewards: Iterable[str]) -> None:
        """Raises ValueError where this does not fit the other settings of RL."""
        if every is None:
            if keep == "best" or self != Validation():
                raise ValueError("keep 'best' and validation need validate_every, the steps between validations")
        elif method not in ("grpo", "ppo", "online_rft"):
            raise ValueError(f"validate_every is for methods whose policy samples; method is {method!r}")
        elif self.metric not in (known := [REWARD, *rewards]) and self.metric not in MODEL_REWARDS:
            raise ValueError(f"validation.metric: no {self.metric!r} here; choose from {', '.join(known)}")
