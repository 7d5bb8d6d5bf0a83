"""Settings of the methods with which GRPO is compared.

Sources: DSM = DeepSeekMath, arXiv 2402.03300; R1 v2 = arXiv 2501.12948, the Nature version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo.settings import Settings


class PPO(Settings):
    """Proximal policy optimization with a learned value function (DSM eq. 1 and 2; InstructGPT), as a baseline."""

    value: Literal["model", "head"] = Field(
        "model", description="A separate model as large as the policy, or a head on the policy's last hidden states."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(
        1.0, ge=0, le=1, description="GAE lambda. R1 v2: 1.0 nearly matches GRPO, 0.95 is much worse."
    )
    value_coef: float = Field(0.5, gt=0, description="Weight of the value loss against the policy's.")
    value_clip: float = Field(0.2, gt=0, description="Maximum change of a value from its old one. InstructGPT: 0.2.")
    value_learning_rate: float | None = Field(
        None, gt=0, description="Peak rate of the value function. None: the policy's."
    )
    whiten: bool = Field(True, description="Normalize advantages to mean 0, std 1 per rollout.")


class DPO(Settings):
    """Direct preference optimization on pairs of the initial policy's completions (arXiv 2305.18290; DSM A.1.4)."""

    beta: float = Field(0.1, gt=0, description="Strength of the KL constraint to the reference.")
    length_average: bool = Field(False, description="Average log-probabilities over length (DSM), or sum them.")
    files: list[Path] = Field(
        [],
        exclude_if=lambda files: not files,
        description="Files of pairs or ranked responses to train on instead of sampled ones, whole responses; the docs "
        "page Alignment lists the columns. A step uses prompts_per_step * group_size / 2 pairs.",
    )
