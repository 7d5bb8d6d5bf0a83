"""What each process of a team measures of DPO's pairs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo.distributed.process_group import Parallel
from grpo.model.loading import load_tokenizer
from grpo.rl.demonstrations import GivenPairs
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models
from grpo.rl.per_token_values import PerToken
from grpo.train import read_job


class WatchedModels(Models):
    """`measured`: number of sequences in each call of the reference."""

    measured: list[int]

    @contextlib.contextmanager
    def reference_logprobs(self, temperature: float) -> Iterator[PerToken]:
        self.measured = []
        with super().reference_logprobs(temperature) as of:

            def watched(prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
                self.measured.append(len(prompts))
                return of(prompts, completions)

            yield watched


def pairs_measured(parallel: Parallel, path: Path) -> dict[str, Any]:
    """The reference's log-probabilities of the first step's pairs, and the sequences in each call in this process."""
    job: Any = read_job(path)
    models = WatchedModels(job.model, job.settings, METHODS["dpo"], parallel)
    rollout = GivenPairs(job, load_tokenizer(job.model), models)(0, 1, 0)
    assert rollout.ref_logprobs is not None
    return {"logprobs": [row.tolist() for row in rollout.ref_logprobs], "measured": models.measured}
