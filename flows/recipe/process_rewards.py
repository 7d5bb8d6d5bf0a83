"""The recipe section of the process reward model."""

from __future__ import annotations

from pydantic import Field

from flows.recipe.sections import Section
from grpo.config.common import Sampling
from grpo.config.scoring import Scoring
from grpo.config.supervised import ProcessRewardModel


class ProcessRewards(Section):
    """A process reward model of Dev1's reasoning: chains, labels by rollouts, training (Math-Shepherd, arXiv
    2312.08935)."""

    problems: int = Field(ge=1, description="Training problems whose solutions are labeled. DSM: unpublished.")
    samples_per_problem: int = Field(
        4, ge=1, description="Solutions per problem; identical ones are labeled once. Ours."
    )
    sampling: Sampling = Field(description="How solutions, and rollouts from their steps, are sampled.")
    rollouts: int = Field(8, ge=1, description="Completions from the end of each step. Math-Shepherd: 8.")
    held_out_share: float = Field(0.15, gt=0, lt=1, description="Share of problems that only measure accuracy. Ours.")
    shard_chains: int = Field(256, ge=1, description="Solutions per shard; a killed stage relabels at most one shard.")
    scoring: Scoring = Scoring()
    training: ProcessRewardModel
