"""Modules that count positions over their tokens get those of the sequences, in a pack and in a decoding step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import alone, build
from grpo.config.common import Hardware, Sampling
from grpo.generation.sampler import sample
from grpo.model.lm_head import backbone_of
from grpo.model.loading import decodes_exactly, load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed

PROMPTS = [[5, 9, 7, 6, 11, 23, 31], [5, 9, 7, 6, 11, 23, 31], [12, 40], [12, 40], [3]]
COMPLETIONS = [[7, 8, 9, 10, 11, 12, 13, 14] * 3, [30], [20, 21, 22] * 8, [33] * 5, [8, 9]]


def given(policy: Any) -> set[str]:
    return {type(module).__name__ for module in policy.modules() if hasattr(module, "range_calls")}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["llama4", "llama4_text"])
@pytest.mark.parametrize("floor_scale", [8, 20])  # what the probe's pack of 17 tokens shows, and what it does not
def test_temperatures_by_position_are_those_of_each_sequence(
    kind: str, floor_scale: int, checkpointing: bool, tmp_path: Path
) -> None:
    build(kind, tmp_path, floor_scale=floor_scale, attn_scale=2.0)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = load_policy(str(tmp_path), Hardware(device="cpu", gradient_checkpointing=checkpointing))
    assert is_packed(backbone_of(policy))
    assert decodes_exactly(policy)
    assert given(policy) == {"Llama4TextAttention"}
    if checkpointing:
        policy.train()  # as an update does; dropout is 0
    logprobs = completion_logprobs(policy, PROMPTS, COMPLETIONS, 1.0)
    expected = [alone(own, prompt, completion) for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    for row, right in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(row[: len(right)], right, rtol=0, atol=2e-5)
    logprobs.sum().backward()
    torch.cat(expected).sum().backward()
    for (name, one), other in zip(policy.named_parameters(), own.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None
            atol = 1e-4 * max(1.0, other.grad.abs().max().item())
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=atol, msg=name)


def test_and_when_decoding(tmp_path: Path) -> None:
    build("llama4_text", tmp_path, floor_scale=20, attn_scale=2.0)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = load_policy(str(tmp_path), Hardware(device="cpu"))
    prompts = [[5, 9, 7, 6, 11, 23, 31] * 2, [12, 40]]
    groups = sample(policy, prompts, 12, Sampling(max_new_tokens=24), eos_id=2, seeds=[1, 2])  # 24 rows: beyond 20
    assert max(len(c.tokens) for group in groups for c in group) > 20
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            with torch.no_grad():
                right = alone(own, prompt, completion.tokens)
            assert completion.logprobs == pytest.approx(right.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["zaya", "inkling_text"])
def test_other_ranges_stay(kind: str, tmp_path: Path) -> None:
    """Zaya orders tokens by expert. Inkling's attention gathers distances, and runs by rows."""
    build(kind, tmp_path)
    policy = load_policy(str(tmp_path), Hardware(device="cpu"))
    assert is_packed(backbone_of(policy))
    assert given(policy) == set()
