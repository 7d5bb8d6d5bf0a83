"""A full GPU ends in one line that names what held the memory. Sizes are those of CPU tensors, which can be counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from grpo import train
from grpo.config.jobs import JobBase
from grpo.model.decode.cache import KeyValues
from grpo.training.out_of_memory import explain, held_bytes, in_use

CPU = torch.device("cpu")


class Objects:
    """A trainer's objects: 2^20 float32 weights, their gradients, two moments each, and a cache of 2^20 numbers."""

    def __init__(self) -> None:
        self.model = nn.Linear(1024, 1024, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, 1024)).sum().backward()
        self.optimizer.step()
        self.cache = KeyValues()
        self.cache.prompts, self.cache.rows = [torch.zeros(2**18)] * 2, [torch.zeros(2**18), torch.zeros(2**19)]


def test_what_is_held() -> None:
    before = held_bytes(CPU)
    objects = Objects()
    held = held_bytes(CPU)
    grown = {name: held[name] - before[name] for name in held}
    assert grown["weights"] == 4 * 2**20
    assert grown["gradients"] == 4 * 2**20
    assert grown["optimizer state"] == 2 * 4 * 2**20 + 4  # and the step's number
    assert grown["key-value caches"] == 4 * 2**20  # one tensor stands there twice
    del objects


def test_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"weights": 3 * 10**9, "gradients": 10**9, "optimizer state": 0, "key-value caches": 2 * 10**9}
    monkeypatch.setattr("grpo.training.out_of_memory.held_bytes", lambda _: dict(held))
    error = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
    statistics = {"allocated_bytes.all.current": 10 * 10**9, "reserved_bytes.all.current": 11 * 10**9}
    assert explain(error, CPU, statistics) == (
        "the device's memory is full (CUDA out of memory). It held: activations and logits 4.00 GB, weights 3.00 GB, "
        "key-value caches 2.00 GB, unused by fragments 1.00 GB, gradients 1.00 GB. For less of activations and logits: "
        "lower micro_batch_tokens or set hardware.gradient_checkpointing = true. For less of weights: set "
        "hardware.dtype = 'bfloat16' or raise hardware.processes, which divide them"
    )


def test_an_earlier_phase_that_held_more_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update held 76 GB; later sampling fails, when 50 GB are in use."""
    held = {"weights": 14 * 10**9, "gradients": 0, "optimizer state": 0, "key-value caches": 35 * 10**9}
    monkeypatch.setattr("grpo.training.out_of_memory.held_bytes", lambda _: dict(held))
    allocated, reserved = ("allocated_bytes.all", "reserved_bytes.all")
    statistics = {f"{allocated}.peak": 76 * 10**9, f"{reserved}.peak": 78 * 10**9}
    statistics |= {f"{allocated}.current": 50 * 10**9, f"{reserved}.current": 53 * 10**9}
    line = explain("CUDA out of memory. Tried to allocate 2.00 GiB.", CPU, statistics)
    assert "It held: key-value caches 35.00 GB, weights 14.00 GB, unused by fragments 3.00 GB, activations" in line
    assert "activations and logits 1.00 GB. For less of key-value caches: lower sampling.batch_size. For less" in line


@pytest.mark.parametrize("graphs", ["", "with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), "])
def test_the_figures_of_torchs_message_are_those_of_the_moment(graphs: str) -> None:
    """Tensors that were freed while the error went up are not in the statistics any more."""
    error = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is "
        "free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated memory "
        f"60.50 GiB is allocated by PyTorch, {graphs}and 512.00 MiB is reserved by PyTorch but unallocated. If reserved"
    )
    statistics = {"allocated_bytes.all.current": 10**9, "reserved_bytes.all.current": 60 * 10**9}
    assert in_use(error, statistics) == (int(60.5 * 2**30), 2**29)
    assert in_use("CUDA out of memory.", statistics) == (10**9, 59 * 10**9)
    assert in_use("CUDA out of memory.", {}) == (0, 0)


def test_the_trainer_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: JobBase) -> None:
        objects = Objects()
        raise torch.OutOfMemoryError(f"CUDA out of memory. {len(objects.cache.rows)}")

    monkeypatch.setattr(f"{__name__}.full", full, raising=False)
    monkeypatch.setitem(train.RUNNERS, "copy_model", f"{__name__}:full")
    paths = {name: str(tmp_path / name) for name in ("out", "state", "metrics", "result", "model")}
    job = tmp_path / "job.json"
    job.write_text(train.json.dumps({"kind": "copy_model", "seed": 0, **paths}))
    assert train.main([str(job)]) == 1
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: the device's memory is full (CUDA out of memory). It held: ")
    assert "optimizer state 0.01 GB" in line and "\n" not in line
