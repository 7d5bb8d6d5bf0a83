"""No tensor of the host meets one of the GPU: what a GPU runs, on fake CUDA tensors (`tests.support.fake_cuda`).

PyTorch's causal bias is replaced by the mask that it stands for, because dispatch modes cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from grpo.algorithms.dpo import dpo_loss
from grpo.algorithms.gae import value_loss
from grpo.algorithms.importance_sampling import correct_for_sampler
from grpo.algorithms.objectives import OBJECTIVES, Objective
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.config.common import Sampling
from grpo.generation.sampler import sample
from grpo.model.decode import recorded
from grpo.model.fused.blocks import _replace_forward
from grpo.model.lm_head import backbone_of
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed import packing, scores
from grpo.model.packed.attention import NAME, UNFUSED
from grpo.model.packed.scores import ScoreOptions, VisibleTokens
from grpo.model.packed.transfer import to_device
from tests.support.fake_cuda import FakeCuda, prepare
from tests.support.small_models import SHAPE

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
COMPLETIONS = [[10, 11], [12, 13, 14], [10, 12], [13, 11, 10]]
KINDS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
}
NORMALIZERS = Normalizers(sequences=4, tokens=10, budget=8)


@pytest.fixture
def cuda(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    prepare(tmp_path_factory.mktemp("guard"), monkeypatch)
    monkeypatch.setattr(recorded, "record", lambda *_: None)  # it needs a GPU
    with torch.autograd.set_multithreading_enabled(False), FakeCuda() as mode:
        yield mode


def model_on_cuda(kind: str, way: str, dtype: torch.dtype) -> Any:
    """`way`: 'fused', 'blocks of transformers' or 'unfused'."""
    with torch.device("cuda"):
        attention = UNFUSED if way == "unfused" else NAME
        model = AutoModelForCausalLM.from_config(KINDS[kind], dtype=dtype, attn_implementation=attention)
    model.r1flow_logit_scale = 1.0  # is measured, and there are no numbers
    if way == "fused":
        _replace_forward(backbone_of(model))
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "way", "dtype"),
    [
        ("llama", "unfused", torch.float32),
        ("llama", "blocks of transformers", torch.bfloat16),
        ("qwen3", "fused", torch.bfloat16),
    ],
)
def test_logprobs_and_samples(cuda: FakeCuda, kind: str, way: str, dtype: torch.dtype) -> None:
    model = model_on_cuda(kind, way, dtype)
    logprobs = completion_logprobs(model, PROMPTS, COMPLETIONS, 0.7)
    assert (logprobs.device.type, logprobs.dtype, logprobs.shape) == ("cuda", torch.float32, (4, 3))
    assert logprobs.requires_grad and cuda.waits == []
    settings = Sampling(max_new_tokens=5, batch_size=8, top_p=0.9)  # two prompts at first, then the third
    groups = sample(model, [[5, 6, 7], [8, 9], [4]], 4, settings, eos_id=-1, seeds=[1, 2, 3])
    assert [len(c.tokens) for group in groups for c in group] == [5] * 12
    # After 5, 8 and 10 steps it looks at what has ended; after 5 and 10 it takes tokens and log-probabilities.
    first, later = [(8,), (8, 5), (8, 5)], [(4,), (4,), (4, 5), (4, 5)]
    assert cuda.waits == [("aten._to_copy", shape) for shape in first + later]


@pytest.mark.parametrize(
    ("dtype", "window", "heads"),
    [
        (torch.bfloat16, None, (4, 2)),  # flash attention takes heads that share keys
        (torch.bfloat16, 2, (4, 4)),  # it takes no masks, and what takes them no such heads
        (torch.float32, None, (4, 4)),
    ],
)
def test_no_attention_keeps_the_scores_of_all_pairs(
    cuda: FakeCuda, dtype: torch.dtype, window: int | None, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[tuple[int, int]]()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool, **_: Any) -> torch.Tensor:
        assert k.shape == v.shape and enable_gqa == (q.shape[1] != k.shape[1])
        given.append((q.shape[1], k.shape[1]))
        return q

    monkeypatch.setattr(scores, "scaled_dot_product_attention", attention)
    q, k = (torch.zeros(1, count, 5, 8, dtype=dtype, device="cuda") for count in (4, 2))
    sees = VisibleTokens(lambda row, head, query, key: query - key < window, window) if window else None
    attended = scores.causal_attention(q, k, k, ScoreOptions(0.3, sees), 5)
    assert given == [heads] and attended.shape == q.shape and attended.dtype == dtype


def test_attention_in_no_fixed_order_is_switched_off() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def tokens_on_cuda() -> Tokens:
    values = [torch.randn(4, 3, device="cuda", requires_grad=number == 0) for number in range(4)]
    return Tokens(*values, mask=torch.ones(4, 3, device="cuda"))


@pytest.mark.parametrize("name", [*OBJECTIVES])
def test_objectives(cuda: FakeCuda, name: str) -> None:
    objective = Objective(
        name,
        clip_eps_low=0.2,
        clip_eps_high=0.3,
        kl_coef=0.01,
        kl_estimator="k3",
        kl_stale_correction=True,
    )
    tokens, stats = correct_for_sampler(tokens_on_cuda(), torch.randn(4, 3, device="cuda"), 2.0, NORMALIZERS)
    loss, more = objective(tokens, NORMALIZERS)
    assert {tensor.device.type for tensor in (loss, *stats.values(), *more.values())} == {"cuda"}
    assert cuda.waits == []


def test_losses_of_values_and_preferences(cuda: FakeCuda) -> None:
    t = tokens_on_cuda()
    of_values = value_loss(t.logprobs, t.old_logprobs, t.advantages, t.mask, 0.2, NORMALIZERS)
    assert t.ref_logprobs is not None
    halves = [x[half::2] for x in (t.logprobs, t.ref_logprobs, t.mask) for half in (0, 1)]
    of_pairs, _ = dpo_loss(*halves, beta=0.1, length_average=False, pairs=2)
    assert (of_values.device.type, of_pairs.device.type, cuda.waits) == ("cuda", "cuda", [])


def test_a_copy_that_waits_is_found(cuda: FakeCuda) -> None:
    torch.tensor([1, 2]).to("cuda")
    torch.tensor([1, 2, 3], device="cuda")
    to_device(torch.tensor([1]), torch.device("cuda"))
    assert cuda.waits == [("a copy from the host", (2,)), ("a copy from the host", (3,))]


def test_a_tensor_left_on_the_host_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_on_cuda("llama", "fused", torch.float32)
    monkeypatch.setattr(packing, "to_device", lambda tensor, _: tensor)
    with pytest.raises(RuntimeError, match="same device"):
        completion_logprobs(model, PROMPTS, COMPLETIONS, 1.0)
