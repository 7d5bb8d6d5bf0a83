"""Processes of a team that sample with the trainer's own weights, whose gathering takes all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from grpo.config.common import Sampling
from grpo.config.rl import RL
from grpo.data.completions import Completion
from grpo.distributed.process_group import Parallel
from grpo.generation import engines
from grpo.generation.engines import ContinuousBatching
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models


def refusing(*_: Any, **__: Any) -> Iterator[tuple[int, list[Completion]]]:
    """transformers' continuous batching where it cannot run."""
    raise ValueError("no such cache")
    yield


def sampled_continuously(
    parallel: Parallel, folder: str, shares: list[list[list[int]]], refused: int | None
) -> dict[str, Any]:
    """Numbers of the prompts that each process completed, and what samples afterwards. `shares`: prompts of each.
    `refused`: rank of the process in which transformers refuses the model."""
    settings = RL.model_validate(
        {
            "steps": 1,
            "sampling": {"max_new_tokens": 4},
            "optimizer": {"learning_rate": 1e-3},
            "hardware": {"device": "cpu"},
        }
    )
    engine = ContinuousBatching(Models(folder, settings, METHODS["grpo"], parallel), 1)
    mine = shares[parallel.rank]
    with pytest.MonkeyPatch.context() as patch:
        if parallel.rank == refused:
            patch.setattr(engines, "sample_continuously", refusing)
        done = dict(engine.sample(mine, 2, Sampling(max_new_tokens=4), [1] * len(mine)))
    return {"completed": parallel.all_gather(sorted(done)), "name": engine.name}
