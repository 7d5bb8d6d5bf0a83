"""The loss on held-out sequences during SFT."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from grpo.config.jobs import SFTJob
from grpo.data.examples import Example
from grpo.distributed.fsdp import Sharded
from grpo.distributed.process_group import divide
from grpo.errors import InputError
from grpo.model.packed.packing import micro_batches
from grpo.training.selection import PREFIX, Selection

LOSS = "loss"
Loss = Callable[[Any, list[Example]], torch.Tensor]
"""(model, examples) -> the sum of their losses."""
_READ_ROWS = 1024
"""Held-out sequences in memory at a time; the others stay on disk."""


class Subset(Sequence[Example]):
    """Some rows of a sequence of examples, without a copy of them."""

    def __init__(self, examples: Sequence[Example], rows: Sequence[int]):
        self.examples, self.rows = examples, array("q", rows)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return Subset(self.examples, self.rows[index])
        return self.examples[self.rows[index]]


def hold_out(examples: Sequence[Example], share: float) -> tuple[Sequence[Example], Sequence[Example]]:
    """Splits into (trained on, held out) by the hash of the prompts' tokens, so that no prompt is in both parts."""
    sides: tuple[list[int], list[int]] = [], []
    for row in range(len(examples)):
        digest = hashlib.sha256(repr(examples[row].prompts).encode()).digest()
        sides[int.from_bytes(digest[:6]) / 2**48 < share].append(row)
    if not all(sides):
        raise InputError(
            f"validation.share {share} of {len(examples)} sequences: {len(sides[1])} are held out and {len(sides[0])} "
            "are left to train on; neither may be 0"
        )
    return Subset(examples, sides[0]), Subset(examples, sides[1])


class HeldOutLoss:
    """Runs the validations of a supervised job: the mean loss over held-out tokens."""

    def __init__(self, job: SFTJob, model: Sharded, examples: Sequence[Example], loss: Loss):
        self.model, self.examples, self.loss, self.settings = model, examples, loss, job.settings
        patience = self.settings.validation.patience
        self.selection = Selection(model.parallel, job.state, {"model": model}, self.settings.keep, patience)

    def due(self, step: int, steps: int) -> bool:
        return step % (self.settings.validate_every or steps) == 0 or step == steps

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of the model after `step`. All processes must call it together."""
        total = weight = 0.0
        for start in range(0, len(self.examples), _READ_ROWS):
            part = self.examples[start : start + _READ_ROWS]
            total += self._total([*part])
            weight += sum(example.weight for example in part)
        metrics = {PREFIX + LOSS: total / weight}
        self.selection.observe(step, -metrics[PREFIX + LOSS], metrics)
        return metrics

    def keep(self, step: int) -> dict[str, Any]:
        """After the last step, loads the weights that the job keeps. Returns their entries for the job's result: `kept`
        and `metrics`."""
        self.selection.load(step)
        kept = self.selection.kept(LOSS)
        return {"metrics": kept.pop("metrics"), "kept": kept}

    @torch.no_grad()
    def _total(self, examples: list[Example]) -> float:
        """Sum of the losses. Each process computes its share; the sum runs in batch order."""
        parallel = self.model.parallel
        prompts = [example.prompts[0] for example in examples]
        rests = [example.rests[0] for example in examples]
        batches = micro_batches(prompts, rests, [[i] for i in range(len(prompts))], self.settings.micro_batch_tokens)
        shares = divide([sum(examples[i].tokens for i in batch) for batch in batches], parallel.world)
        mine = {n: self.model(self.loss, [examples[i] for i in batches[n]]).item() for n in shares[parallel.rank]}
        for _ in range(max(map(len, shares)) - len(mine)):  # all processes must call the model equally often
            self.model(self.loss, [min(examples, key=lambda example: example.tokens)])
        sums = {number: value for share in parallel.all_gather(mine) for number, value in share.items()}
        return sum(sums[number] for number in sorted(sums))
