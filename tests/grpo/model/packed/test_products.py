"""Products of bfloat16 tensors with float32 results."""

from __future__ import annotations

import pytest
import torch

from grpo.model.packed import products
from grpo.model.packed.products import Widened, float32_bmm, float32_linear, kept_in_float32

# 1 + 2^-8 needs 9 bits; bfloat16 has 8. Both factors are bfloat16 numbers, their product is not.
X = torch.tensor([[1.0, 2.0**-4]], dtype=torch.bfloat16)
W = torch.tensor([[1.0, 2.0**-4], [2.0, 0.0], [0.0, 4.0]], dtype=torch.bfloat16)
EXACT = [[1.00390625, 2.0, 0.25]]


@pytest.mark.parametrize("widened", [2, 10**6], ids=["in parts", "at once"])
def test_a_logit_is_not_rounded(monkeypatch: pytest.MonkeyPatch, widened: int) -> None:
    monkeypatch.setattr(products, "WIDENED", widened)
    with torch.no_grad():
        product = float32_linear(X, W, torch.tensor([0.0, 1.0, 0.0], dtype=torch.bfloat16))
    assert product.dtype == torch.float32
    assert product.tolist() == [[1.00390625, 3.0, 0.25]]
    assert torch.nn.functional.linear(X, W).tolist() == [[1.0, 2.0, 0.25]]  # what would be without


def test_weights_that_are_kept_in_float32_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_in_float32(W)
    assert isinstance(kept, Widened) and kept.copy.dtype == torch.float32
    assert float32_linear(X, kept, W[:, 1]).tolist() == float32_linear(X, W, W[:, 1]).tolist()
    assert kept_in_float32(W.float()).dtype == torch.float32
    monkeypatch.setattr(products, "KEPT", W.numel() - 1)
    assert kept_in_float32(W) is W  # too many for a copy


def test_it_has_gradients() -> None:
    weight = W.clone().requires_grad_()
    product = float32_linear(X, weight, None)
    assert product.tolist() == EXACT
    product.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[1.0, 0.0625]] * 3


def test_wide_types_are_left_alone() -> None:
    x, weight = X.double(), W.double()
    assert float32_linear(x, weight, None).dtype == torch.float64


def test_scores_are_not_rounded() -> None:
    scores = float32_bmm(X.view(1, 1, 1, 2), W.t().reshape(1, 1, 2, 3))
    assert scores.tolist() == [[EXACT]]


def test_a_cpu_multiplies_as_bfloat16_only_what_is_bfloat16() -> None:
    def inside(x: torch.Tensor) -> str:
        with products._multiplying_as_bfloat16(x):
            return str(torch.backends.mkldnn.matmul.fp32_precision)

    before = torch.backends.mkldnn.matmul.fp32_precision
    assert inside(X) == "bf16"
    assert inside(X.half()) == inside(X.float()) == inside(X.to("meta")) == before
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_threads_do_not_see_each_others_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(*arguments: torch.Tensor | None) -> torch.Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return torch.nn.functional.linear(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(products, "linear", noted)
    before = torch.backends.mkldnn.matmul.fp32_precision
    for beside in (0, 1, -1):  # none, one, and none again
        products.compute_beside(beside)
        assert float32_linear(X, kept_in_float32(W), None).tolist() == EXACT
        assert float32_linear(X.float(), kept_in_float32(W), None).tolist() == EXACT
    assert seen == ["bf16", before, before, before, "bf16", before]


def test_what_is_wider_is_not_multiplied_as_bfloat16() -> None:
    wide, ones = torch.full((512, 64), 1 + 2.0**-12), torch.ones(512, 64, dtype=torch.bfloat16)
    exact = torch.full((512, 512), 64 + 2.0**-6)  # 64 * (1 + 2^-12); in bfloat16 the factor would be 1
    assert float32_linear(ones, wide, None).equal(exact)
    assert float32_linear(wide, kept_in_float32(ones), None).equal(exact)


def test_large_products_are_as_exact_with_units_for_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 96, generator=generator).bfloat16() for size in (64, 512))
    exact = x.double() @ weight.double().t()
    with torch.no_grad():
        # Sums of 96 products of about 1 in float32; rounded to bfloat16 they would be wrong by up to 0.1.
        torch.testing.assert_close(float32_linear(x, weight, None).double(), exact, atol=1e-4, rtol=0)
        torch.testing.assert_close(float32_linear(x, kept_in_float32(weight), None).double(), exact, atol=1e-4, rtol=0)
