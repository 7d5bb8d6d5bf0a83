"""Source digests of a user's own reward functions, and whether a step reward is a folder with a model."""

from grpo.rewards.registry import source_digest
from grpo.rewards.steps import is_folder

__all__ = ["is_folder", "source_digest"]
