"""Steps of supervised training whose loss is not finite: one is skipped, several in a row end training."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.config.common import Hardware
from grpo.data.examples import Example
from grpo.distributed.fsdp import shard
from grpo.distributed.process_group import Parallel
from grpo.errors import TrainingStopped
from grpo.model.loading import load_policy
from grpo.train import read_job
from grpo.training.sft import cross_entropy
from grpo.training.supervised import closing_loss, fit
from tests.support.job_runner import CPU, metrics, steps, write_job

EXAMPLES = [Example([[5, 6]], [[token, token + 1]], weight=2) for token in range(7, 15)]


@dataclass
class Run:
    """A job of as many steps, some of which have the loss `bad`. Each step has one micro-batch."""

    folder: Path
    bad: dict[int, float]
    before: list[Tensor] = field(default_factory=list)  # the weights before each step

    def loss(self, model: Any, examples: list[Example]) -> Tensor:
        self.before.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return cross_entropy(model, examples) * self.bad.get(len(self.before), 1.0)

    def __call__(self, model_folder: str, count: int, save_every: int = 1) -> None:
        settings = {"batch_size": 2, "max_steps": count, "save_every": save_every, "hardware": CPU}
        settings |= {"optimizer": {"learning_rate": 0.01}}
        job = read_job(write_job(self.folder, "sft", settings=settings, model=model_folder, data="x"))
        model = shard(load_policy(model_folder, Hardware(device="cpu")), Parallel.alone(torch.device("cpu")))
        fit(job, model, EXAMPLES, self.loss, job.settings, count)

    @property
    def moved(self) -> list[bool]:
        """For each step except the last, whether it moved the weights."""
        return [not torch.equal(*pair) for pair in zip(self.before, self.before[1:], strict=False)]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "state").glob("step-*"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_moves_nothing(value: float, model_folder: str, tmp_path: Path) -> None:
    run = Run(tmp_path, {3: value, 4: value})
    run(model_folder, 6)
    assert run.moved == [True, True, False, False, True] and run.before[-1].isfinite().all()
    records = metrics(tmp_path)
    assert [record.get("skipped", 0.0) for record in records] == [0, 0, 1, 1, 0, 0]
    finite = [record["loss"] for record in records if "skipped" not in record]
    assert closing_loss(tmp_path / "metrics.jsonl") == {"loss": pytest.approx(sum(finite) / 4)}


def test_three_in_a_row_end_training_at_its_last_good_checkpoint(model_folder: str, tmp_path: Path) -> None:
    run = Run(tmp_path, dict.fromkeys((3, 4, 5), math.nan))
    said = r"^not_finite: step 5: loss is nan, grad_norm is nan \(must be finite\), 3 times in a row; lower"
    with pytest.raises(TrainingStopped, match=said):
        run(model_folder, 6)
    assert run.moved == [True, True, False, False]
    assert run.checkpoints[-1] == "step-00000002"
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_job_of_which_no_step_counts_does_not_succeed(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="step 2: loss is nan"):
        Run(tmp_path, dict.fromkeys((1, 2), math.nan))(model_folder, 2)


def test_a_stop_in_a_skipped_step_leaves_a_checkpoint(model_folder: str, tmp_path: Path) -> None:
    """The request is made once; without it all steps since the last checkpoint would be done again."""
    run = Run(tmp_path, {3: math.nan})
    loss = run.loss

    def stopped(model: Any, examples: list[Example]) -> Tensor:
        if len(run.before) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, examples)

    class Ended(BaseException):
        pass

    def end(_: object) -> None:
        raise Ended

    run.loss = stopped  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Ended):
        patched.setattr("grpo.training.supervised.StopRequest.end", end)
        run(model_folder, 6, save_every=100)
    assert run.checkpoints == ["step-00000003"]
