"""The batches of a job as verl's SFT trainer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from grpo.data.token_shards import TokenShards

TOKENS, ROWS, BATCHES = "tokens", "rows.txt", "batches.npy"
"""In the folder of the data: token shards, the number of rows that they come from, and the numbers of the sequences in
each batch, int64 [steps, batch_size]."""
FILLER = -1
"""In a batch: a sequence without trained tokens. An epoch's last batch is smaller, which verl cannot have."""


class Batches(Dataset[dict[str, torch.Tensor]]):
    """The sequences of all batches one after the other, prompts without loss.

    verl's trainer shuffles its data set with a DistributedSampler, and process `r` of `N` takes every `N`-th place from
    the `r`-th on. This data set is ordered so that the shuffled one has the batches in their order.
    """

    def __init__(self, parquet_files: str, **_: Any):
        folder = Path(parquet_files)
        batches = np.load(folder / BATCHES)
        count = int((folder / ROWS).read_text())
        self._sequences = TokenShards(folder / TOKENS, count)
        places: Any = range(batches.size)
        self._shortest = int(self._sequences.tokens().argmin())
        sampler: DistributedSampler[int] = DistributedSampler(places, num_replicas=1, rank=0, shuffle=True)
        sampler.set_epoch(0)
        self._numbers = np.empty(batches.size, np.int64)
        self._numbers[list(sampler)] = batches.reshape(-1)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = int(self._numbers[index])
        sequence = self._sequences[self._shortest if number == FILLER else number]
        (prompt,), (rest,) = sequence.prompts, sequence.rests
        trained = 0 if number == FILLER else 1
        return {
            "input_ids": torch.tensor([*prompt, *rest]),
            "position_ids": torch.arange(len(prompt) + len(rest)),
            "loss_mask": torch.tensor([0] * len(prompt) + [trained] * len(rest)),
        }
