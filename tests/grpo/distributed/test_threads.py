"""Fused models take as many threads as cores are free; others keep theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo.config.common import Hardware
from grpo.distributed import threads
from grpo.distributed.threads import adapt_threads, use_all_threads
from grpo.model.forward_ways import choose_way
from grpo.model.logprobs import completion_logprobs

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch):
    """How many cores are free, in a trainer that was started with three threads and whose sums ignore their number."""
    before = torch.get_num_threads()
    cores = SimpleNamespace(value=3)
    monkeypatch.setattr(threads, "sums_ignore_threads", lambda: True)
    monkeypatch.setattr(threads, "FreeCores", lambda: SimpleNamespace(count=lambda: cores.value))
    monkeypatch.setattr(threads, "_threads", None)
    torch.set_num_threads(3)
    yield cores
    torch.set_num_threads(before)


def llama(hardware: Hardware) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))
    choose_way(model, "tiny", hardware)
    torch.set_num_threads(3)
    return model


def test_a_fused_model_gives_threads_up_and_takes_them_back(free) -> None:
    model = llama(Hardware(device="cpu"))
    counts = []
    for value in (3, 1, 2, 7):
        free.value = value
        completion_logprobs(model, [[1, 2, 3]], [[4, 5]], 1.0)
        counts.append(torch.get_num_threads())
    assert counts == [3, 1, 2, 3]


@pytest.mark.parametrize("hardware", [{"fused": False}, {"attention": "plain"}])
def test_a_model_that_is_not_fused_keeps_its_threads(free, hardware) -> None:
    model = llama(Hardware(device="cpu", **hardware))
    free.value = 1
    adapt_threads(CPU, torch.float32)
    assert torch.get_num_threads() == 1
    completion_logprobs(model, [[1, 2, 3]], [[4, 5]], 1.0)
    assert torch.get_num_threads() == 3


def test_in_bfloat16_the_number_changes_in_any_process(free, monkeypatch) -> None:
    monkeypatch.setattr(threads, "sums_ignore_threads", lambda: False)
    for dtype, count in (("float32", 3), ("bfloat16", 1), ("bfloat16", 2)):
        model = llama(Hardware(device="cpu", dtype=dtype)).to(getattr(torch, dtype))
        free.value = count if dtype == "bfloat16" else 1
        completion_logprobs(model, [[1, 2, 3]], [[4, 5]], 1.0)
        assert torch.get_num_threads() == count


def test_the_number_stays_where_it_would_change_sums(free, monkeypatch) -> None:
    monkeypatch.setattr(threads, "sums_ignore_threads", lambda: False)
    free.value = 1
    adapt_threads(CPU, torch.float32)
    use_all_threads(CPU)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(2)  # by the user of the library
    use_all_threads(CPU)
    assert torch.get_num_threads() == 2


def test_a_gpu_leaves_the_threads_alone(free) -> None:
    free.value = 1
    adapt_threads(torch.device("cuda"), torch.bfloat16)
    assert torch.get_num_threads() == 3
