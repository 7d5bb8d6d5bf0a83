"""Packs say what the same sequences say one by one, in value and in gradient; micro-batches hold what they may."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    OlmoConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from grpo.config.common import Sampling
from grpo.generation.sampler import sample
from grpo.model.cpu.limits import CHUNK_BYTES, KEPT_BYTES, chunk_bytes
from grpo.model.fused.blocks import fuse_blocks
from grpo.model.fused.layers import fuse
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import NAME, hidden_states
from grpo.model.packed.packing import micro_batches, pack, shared_prefix
from grpo.model.packed.token_logprobs import token_logprobs

CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "Llama": LlamaConfig(**SHAPE),
    "Llama, tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "Mistral": MistralConfig(**SHAPE, sliding_window=None),
    "Qwen2": Qwen2Config(**SHAPE),
    "Qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "Qwen3-MoE": Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "Phi-3": Phi3Config(**SHAPE),
    "OLMo": OlmoConfig(**SHAPE),
}
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10], [8, 9], [5, 6, 7], [11] * 70, [12, 13]]
COMPLETIONS = [[3, 4, 5], [6], [7, 8, 9, 10] * 20, [11, 12], [13, 14, 15], [16], [17, 18], [19] * 5]


def make(config, fused=False):
    """A model with this library's attention, fused if asked, and the same weights with transformers' own."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    exact = torch.float32 if hasattr(config, "num_experts") else torch.float64  # experts know no float64
    torch.manual_seed(0)
    plain = cls(config).to(exact).eval()
    packed = cls(type(config)(**config.to_diff_dict())).to(exact).eval()
    packed.load_state_dict(plain.state_dict())
    packed.set_attn_implementation(NAME)
    if fused:
        fuse(packed)
        fuse_blocks(packed)
    return packed, plain


def one_by_one(model, prompts, completions, temperature):
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1] / temperature
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_pack_gives_values_and_gradients_of_its_sequences(name, fused, monkeypatch):
    packed, plain = make(CONFIGS[name], fused)
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 50 * 7)  # 7 tokens a chunk
    found = completion_logprobs(packed, PROMPTS, COMPLETIONS, 0.7)
    expected = one_by_one(plain, PROMPTS, COMPLETIONS, 0.7)
    torch.testing.assert_close(found.double(), expected.double(), atol=3e-5, rtol=0)  # the softmax is in float32
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (parameter, mine), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=2e-4, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_gives_the_log_probabilities_of_the_plain_model(name, fused):
    packed, plain = make(CONFIGS[name], fused)
    prompts = [[5, 6, 7], [8, 9], [11] * 20]
    settings = Sampling(max_new_tokens=70, batch_size=8, temperature=0.9)
    groups = sample(packed, prompts, 4, settings, eos_id=2, seeds=[1, 2, 3])
    assert len({len(c.tokens) for group in groups for c in group}) > 3  # they end at different times
    with torch.no_grad():
        for prompt, group in zip(prompts, groups, strict=True):
            expected = one_by_one(plain, [prompt] * 4, [c.tokens for c in group], 0.9)
            for row, completion in zip(expected, group, strict=True):
                found = torch.tensor(completion.logprobs, dtype=row.dtype)
                torch.testing.assert_close(found, row[: len(found)], atol=1e-4, rtol=0)


def test_a_shared_prompt_is_in_the_pack_once():
    # Prompt 5 6 7 is shared by two, 8 9 belongs to one alone.
    made = pack([[5, 6, 7], [8, 9], [5, 6, 7]], [[1, 2], [3], []], CPU)
    assert made.ids.tolist() == [[5, 6, 7, 1, 2, 8, 9, 3]]
    assert made.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert (made.first, made.starts, made.last) == ([2, 6, 2], [3, 7, 5], [4, 7, 2])


def test_a_pack_is_filled_up_to_a_multiple():
    made = pack([[5, 6, 7], [8, 9], [5, 6, 7]], [[1, 2], [3], []], CPU, multiple=5)
    assert made.ids.tolist() == [[5, 6, 7, 1, 2, 8, 9, 3, 0, 0]]
    assert made.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    assert made.last == [4, 7, 2]


def test_a_prompt_may_be_asked_twice_with_nothing_after_it():
    made = pack([[5, 6], [5, 6]], [[], []], CPU)
    assert (made.ids.tolist(), made.last) == ([[5, 6]], [1, 1])
    packed, _ = make(CONFIGS["Llama"])
    settings = Sampling(max_new_tokens=5)
    alone = sample(packed, [[5, 6]], 3, settings, eos_id=2, seeds=[7])
    twice = sample(packed, [[5, 6], [5, 6]], 3, settings, eos_id=2, seeds=[7, 8])
    assert [c.tokens for c in twice[0]] == [c.tokens for c in alone[0]]


def test_sequences_without_a_prompt_are_separate():
    made = pack([[], []], [[1, 2], [1, 2, 3]], CPU)
    assert made.ids.tolist() == [[1, 2, 1, 2, 3]]
    assert made.last == [1, 4]


def test_shared_prefix():
    assert shared_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == 2
    assert shared_prefix([[1, 2], [3]]) == 0
    assert shared_prefix([[1, 2, 3]]) == 3


@pytest.mark.parametrize("softmax", ["_OnCPU", "_OnGPU"])
@pytest.mark.parametrize("kept", [0, 2**20], ids=["computed again", "kept"])
def test_logits_in_chunks_have_the_gradient_of_logits_at_once(kept, softmax, monkeypatch):
    monkeypatch.setattr(
        "grpo.model.packed.token_logprobs._OnCPU", getattr(sys.modules[token_logprobs.__module__], softmax)
    )
    torch.manual_seed(0)
    head, states = torch.nn.Linear(8, 20), torch.randn(11, 8, requires_grad=True)
    targets, weights = torch.randint(20, (11,)), torch.randn(11)
    (head(states) / 0.5).log_softmax(1).gather(1, targets[:, None]).squeeze(1).mul(weights).sum().backward()
    expected = [t.grad.clone() for t in (states, head.weight, head.bias)]
    states.grad = head.weight.grad = head.bias.grad = None
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 20 * 3)  # 3 tokens a chunk
    monkeypatch.setattr("grpo.model.packed.token_logprobs.CACHED_BYTES", 4 * 20 * 2)  # 2 at a time
    monkeypatch.setitem(KEPT_BYTES, "cpu", kept)
    token_logprobs(states, head, targets, 0.5).mul(weights).sum().backward()
    for found, wanted in zip((states.grad, head.weight.grad, head.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("memory, expected", [(16e9, 2**28), (24e9, 300_000_000), (80e9, 10**9), (141e9, 2**30)])
def test_chunks_of_logits_are_an_80th_of_a_gpu(memory, expected):
    assert chunk_bytes("cuda", memory) == expected
    assert chunk_bytes("cpu", memory) == CHUNK_BYTES["cpu"]


def test_another_attention_is_refused():
    _, plain = make(CONFIGS["Llama"])
    packed = pack([[5]], [[6]], CPU)
    with pytest.raises(RuntimeError, match="attn_implementation='r1flow'"):
        hidden_states(plain.model, packed.ids, packed.positions, packed.attention)


def test_micro_batches_by_hand():
    # Prompt a (2 tokens) with rests of 3, 4 and 2: 2 + 4 + 3 = 9 fit in 10, the third needs 2 + 2 = 4 in another.
    # Prompt b with 5 + 1 = 6 joins those 4. 20 tokens alone exceed the bound.
    a, b, c = [1, 1], [2] * 5, [3] * 18
    rests = [[0] * n for n in (3, 4, 1, 2, 2)]
    assert micro_batches([a, a, b, c, a], rests, [[0], [1], [2], [3], [4]], 10) == [[3], [1, 0], [2, 4]]


def test_pairs_stay_together():
    units = [[0, 1], [2, 3]]
    assert micro_batches([[1]] * 4, [[0] * 3] * 4, units, 8) == [[0], [1]]
    assert micro_batches([[1]] * 4, [[0] * 3] * 4, units, 13) == [[0, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_hold_every_unit_once_within_the_bound(seed):
    rng = random.Random(seed)
    prompts = [[p] * rng.randint(1, 30) for p in range(20)]
    rows = [(prompt, [0] * rng.randint(1, 50)) for prompt in prompts for _ in range(8)]
    batches = micro_batches([p for p, _ in rows], [r for _, r in rows], [[i] for i in range(len(rows))], 200)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    packs = [pack([rows[i][0] for i in batch], [rows[i][1] for i in batch], CPU) for batch in batches]
    assert all(made.ids.numel() <= 200 for made in packs)
    # Best fit leaves little room: the bound is filled to nine tenths on average.
    assert sum(made.ids.numel() for made in packs) > 0.9 * 200 * (len(packs) - 1)
