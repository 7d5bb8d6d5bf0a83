"""Recorded decoding steps sample what steps run one by one do.

A stand-in records on a CPU: it keeps the operations of a step with the tensors that they read and wrote, and a replay
executes them again on the same memory, without any Python of the model in between. A CUDA graph does the same.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaModel

from grpo.config.common import Sampling
from grpo.data.completions import Completion
from grpo.generation import sampler
from grpo.generation.sampler import sample
from grpo.model.decode import recorded
from grpo.model.decode.cache import Cache
from grpo.model.packed.attention import NAME, UNFUSED
from tests.support.current_gpus import stand_in
from tests.support.small_models import SHAPE

PROMPTS = [[5, 9, 7, 6, 11], [8, 3], [4, 4, 4, 10, 12, 3, 7, 5], [6, 6, 2]]
LENGTH = 150  # more than two capacities of the cache


class Operations(TorchDispatchMode):
    """Executes operations and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.made.append((function, args, kwargs or {}, written))
        return result


class Recorder:
    """`grpo.model.decode.recorded.record` for a CPU; counts what it records and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor], *_: Any) -> Callable[[], Tensor]:
        self.recorded += 1
        tables = [cell.cell_contents for cell in run.__closure__ or ()] or [run.__self__]  # type: ignore[attr-defined]
        generated = tables[0].generated.clone()
        with Operations() as operations:
            result = run()
        tables[0].generated.copy_(generated)  # recording does not execute

        def replay() -> Tensor:
            self.replayed += 1
            for function, args, options, written in operations.made:
                again = [leaf for leaf in tree_leaves(function(*args, **options)) if isinstance(leaf, Tensor)]
                for old, new in zip(written, again, strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return result

        return replay


@pytest.fixture(params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, model_folder: str, tmp_path: Path) -> Any:
    """Plain attention without our CPU kernels; and windows of 4 tokens with softcaps."""
    if request.param == "gemma2":
        Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, sliding_window=4)).save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation=NAME)
    return AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=UNFUSED)


def token_of_most_lengths(groups: list[list[Completion]]) -> int:
    """The token whose first places differ most between completions; which one it is depends on the CPU."""
    first: dict[int, set[int]] = {}
    for completion in (c for group in groups for c in group):
        for token in set(completion.tokens):
            first.setdefault(token, set()).add(completion.tokens.index(token))
    return max(first, key=lambda token: (len(first[token]), max(first[token])))


@pytest.mark.parametrize("batch_size", [16, 6])
def test_completions_are_the_same(model: Any, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Sampling(max_new_tokens=LENGTH, batch_size=batch_size)
    endless = sample(model, PROMPTS, 3, settings, eos_id=-1, seeds=[1, 2, 3, 4])
    options: dict[str, Any] = dict(eos_id=token_of_most_lengths(endless), seeds=[1, 2, 3, 4])
    expected = sample(model, PROMPTS, 3, settings, **options)
    recorder = Recorder()
    monkeypatch.setattr(recorded, "RECORDS", {"cpu"})
    monkeypatch.setattr(recorded, "record", recorder)
    for table in ("LOOKS", "LEAST_ENDED"):
        monkeypatch.setattr(sampler, table, {})
    actual = sample(model, PROMPTS, 3, settings, **options)
    lengths = {len(c.tokens) for group in expected for c in group}
    assert len(lengths) > 4
    assert recorder.recorded >= 3 and recorder.replayed > 0.8 * max(lengths)
    for ours, theirs in zip(actual, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.tokens, one.finished) == (other.tokens, other.finished)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_steps_that_cannot_be_recorded_are_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Sampling(max_new_tokens=12)
    expected = sample(model, PROMPTS, 2, settings, eos_id=-1, seeds=[1, 2, 3, 4])
    monkeypatch.setattr(recorded, "RECORDS", {"cpu"})
    monkeypatch.setattr(recorded, "record", lambda *_: None)
    actual = sample(model, PROMPTS, 2, settings, eos_id=-1, seeds=[1, 2, 3, 4])
    assert [[c.tokens for c in group] for group in actual] == [[c.tokens for c in group] for group in expected]


class Graphs:
    """torch's graphs, streams and pools on a machine without a GPU. `used`: what was called, and on which GPU. `fails`:
    what the next ends of recordings raise."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: Sequence[Exception] = ()) -> None:
        self.gpus, self.used, self.fails = stand_in(patch), list[tuple[str, Any]](), deque(fails)
        self.pools: list[Any] = []
        stream = SimpleNamespace(wait_stream=lambda _: None)
        graph = SimpleNamespace(capture_begin=self.begin, capture_end=self.end, replay=lambda: None)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        patch.setattr(torch.cuda, "Stream", self.noted("stream", stream))
        patch.setattr(torch.cuda, "current_stream", self.noted("current stream", stream))
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "empty_cache", self.noted("empty cache"))
        patch.setattr(torch.cuda, "MemPool", self.pool)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, lambda *given, name=name: self.used.append((name, given)), raising=False)

    def noted(self, name: str, result: Any = None) -> Any:
        return lambda *_, **__: self.used.append((name, self.gpus.number)) or result

    def pool(self) -> Any:
        self.pools.append(SimpleNamespace(id=(0, 7 + len(self.pools))))
        return self.pools[-1]

    def begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.used.append(("begin", pool))

    def end(self) -> None:
        self.used.append(("end", self.gpus.number))
        if self.fails:
            raise self.fails.popleft()


def test_a_step_is_recorded_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU is current: one that launches nothing would record an empty graph."""
    graphs, result = Graphs(monkeypatch), torch.ones(2)
    memory, backbone = recorded.GraphMemory(), torch.nn.Linear(1, 1)
    for _ in range(2):  # the second in the memory of the first
        graphs.used.clear()
        replay = recorded.record(graphs.noted("run", result), torch.device("cuda", 1), memory, backbone)
        assert replay is not None and replay() is result
        assert graphs.used == [
            ("stream", 1),
            ("current stream", 1),
            ("begin", (0, 7)),
            ("run", 1),
            ("end", 1),
            ("current stream", 1),
        ]
    assert graphs.gpus.number == 0 and len(graphs.pools) == 1


def test_a_recording_that_fails_is_ended_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORDS", {"cpu"})
    graphs = Graphs(monkeypatch, [RuntimeError("operation not permitted when stream is capturing")])
    backbone = torch.nn.Linear(1, 1)
    assert recorded.can_record(backbone, torch.device("cpu"))
    assert recorded.record(graphs.noted("run"), torch.device("cuda", 1), recorded.GraphMemory(), backbone) is None
    ended = [("_cuda_endAllocateToPool", (1, (0, 7))), ("_cuda_releasePool", (1, (0, 7)))]
    assert graphs.used[-2:] == ended  # else torch's allocator takes it for unfinished
    assert not recorded.can_record(backbone, torch.device("cpu"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_recording_without_memory_is_tried_again_with_what_was_unused(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "RECORDS", {"cpu"})
    graphs = Graphs(monkeypatch, [torch.OutOfMemoryError("out of memory")] * times)
    backbone = torch.nn.Linear(1, 1)
    replay = recorded.record(graphs.noted("run"), torch.device("cuda", 0), recorded.GraphMemory(), backbone)
    assert (replay is None) == (times == 2)
    assert [name for name, _ in graphs.used].count("empty cache") == 1
    assert recorded.can_record(backbone, torch.device("cpu"))  # later there may be more


def test_frequencies_that_depend_on_the_length_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers compares a length on the GPU with a number."""
    monkeypatch.setattr(recorded, "RECORDS", {"cpu"})
    ropes: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default", "rope_theta": 1e4},
        "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    }
    can = {
        name: recorded.can_record(LlamaModel(LlamaConfig(**SHAPE, rope_parameters=rope)), torch.device("cpu"))
        for name, rope in ropes.items()
    }
    assert can == {"default": True, "dynamic": False}


def test_a_cache_has_no_place_for_rows_that_have_ended() -> None:
    cache = Cache(torch.zeros(1, 2, 1, 8))
    cache.reserve(256, 1)
    columns = cache.rows[0].shape[2]
    cache.rows[0][:5, 0, 0, 0] = torch.arange(5.0)
    cache.keep([0, 1, 2, 4], [], columns)
    cache.reserve(4, columns + 1)
    assert cache.rows[0].shape == (4, 2, 2 * columns, 8)
    assert cache.rows[0][:, 0, 0, 0].tolist() == [0, 1, 2, 4]


def test_rows_that_have_ended_are_removed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "LEAST_ENDED", {})
    rows = sampler._Rows(10, torch.device("cpu"))
    rows.join([0], 8, [0])
    logits = torch.zeros(8, 5)
    for ended, removed in ((1, 0), (2, 2)):
        logits[:ended, 3] = 1e4
        rows.draw(logits, Sampling(max_new_tokens=10), False)
        rows.tokens[ended:, :] = 0
        assert len(rows.ended(3)) == removed
