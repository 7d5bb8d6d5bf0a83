"""Recurrent layers and the like run on each sequence of a pack; everything else stays packed."""

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
from grpo.model.packed.by_rows import runs_by_rows
from grpo.model.packed.packing import pack

PROMPTS = [[5, 9, 7, 6, 11, 23, 31], [5, 9, 7, 6, 11, 23, 31], [12, 40], [12, 40], [3]]
COMPLETIONS = [[7, 8, 9, 10, 11, 12, 13, 14] * 9, [30], [20, 21, 22], [33] * 5, [8, 9]]


def by_rows(policy: Any) -> set[str]:
    return {type(module).__name__ for module in policy.modules() if runs_by_rows(module)}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_rows_hold_each_sequence_and_every_token_has_one_output() -> None:
    packed = pack([[1, 2], [1, 2], [3]], [[4, 5], [6], [7]], torch.device("cpu"))
    tokens = packed.ids[0]
    whole = [tokens[places].tolist() for places in packed.attention.rows]
    assert [row[:4] for rows in whole for row in rows] == [[1, 2], [1, 2, 4, 5], [1, 2, 6, 1], [3, 7]]
    flat = torch.cat([places.flatten() for places in packed.attention.rows])
    assert flat[packed.attention.slot_in_rows].tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "classes"),
    [
        ("qwen3_next", {"Qwen3NextGatedDeltaNet"}),  # whose layers hand the layout on
        ("bamba", {"BambaMixer"}),
        ("gpt_neo", {"GPTNeoSelfAttention"}),  # whose layers do not
    ],
)
def test_gradients_are_those_of_each_sequence(
    kind: str, classes: set[str], checkpointing: bool, tmp_path: Path
) -> None:
    build(kind, tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = load_policy(str(tmp_path), Hardware(device="cpu", gradient_checkpointing=checkpointing))
    assert is_packed(backbone_of(policy))
    assert by_rows(policy) == classes
    if checkpointing:
        policy.train()  # as an update does; dropout is 0
    logprobs = completion_logprobs(policy, PROMPTS, COMPLETIONS, 1.0)
    other = completion_logprobs(policy, PROMPTS[::-1], COMPLETIONS[::-1], 1.0)  # another layout before going back
    expected = [alone(own, prompt, completion) for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    for row, right in zip(logprobs, expected, strict=True):
        torch.testing.assert_close(row[: len(right)], right, rtol=0, atol=2e-5)
    (logprobs.sum() + other.sum()).backward()
    (2 * torch.cat(expected).sum()).backward()
    found, right = gradients(policy), gradients(own)
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * max(1.0, largest), msg=name)


def test_a_recurrent_model_is_sampled_by_transformers(tmp_path: Path) -> None:
    build("qwen3_next", tmp_path)
    policy = load_policy(str(tmp_path), Hardware(device="cpu"))
    assert not decodes_exactly(policy)
    groups = sample(policy, [[5, 6, 7], [8, 9]], 2, Sampling(max_new_tokens=6), eos_id=2, seeds=[1, 2])
    for prompt, group in zip([[5, 6, 7], [8, 9]], groups, strict=True):
        for completion in group:
            with torch.no_grad():
                (right,) = completion_logprobs(policy, [prompt], [completion.tokens], 1.0)
            assert completion.logprobs == pytest.approx(right.tolist(), abs=1e-4)


@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_a_generate_that_mixes_up_rows_gets_one_at_a_time(
    attention: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RWKV's cached state [B, H] is added to states [B, 1, H] as if it were [1, B, H]."""
    build("rwkv", tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    policy = load_policy(str(tmp_path), Hardware(device="cpu", attention=attention))
    assert "sampled by transformers' generate, one sequence at a time" in caplog.text
    groups = sample(policy, [[5, 6, 7], [8, 9]], 3, Sampling(max_new_tokens=6), eos_id=2, seeds=[1, 2])
    for prompt, group in zip([[5, 6, 7], [8, 9]], groups, strict=True):
        for completion in group:
            with torch.no_grad():
                right = alone(own, prompt, completion.tokens)
            assert completion.logprobs == pytest.approx(right.tolist(), abs=1e-4)
