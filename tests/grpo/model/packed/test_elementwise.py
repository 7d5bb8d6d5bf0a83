"""Elementwise parts and their gradients, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from grpo.model.packed import elementwise, ordered_gradients

N, H = 6, 8


def random(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(
        grad
    )


def test_a_norm_by_hand() -> None:
    normed, inverse = elementwise.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    # The mean of 9 and 16 is 12.5.
    torch.testing.assert_close(inverse, torch.tensor([[12.5**-0.5]]))
    torch.testing.assert_close(normed, torch.tensor([[3 / 12.5**0.5, 8 / 12.5**0.5]]))


def test_gradients_of_a_norm() -> None:
    x, weight, gradient = random(N, H).float().detach(), random(H).float().detach(), random(N, H).float().detach()
    leaves = x.requires_grad_(), weight.requires_grad_()
    normed, inverse = elementwise.rms_norm(*leaves, 1e-5)
    expected = torch.autograd.grad(normed, leaves, gradient)
    found = elementwise.rms_norm_backward(gradient, x.detach(), weight.detach(), inverse.detach())
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_gradients_of_swiglu() -> None:
    gate, up, gradient = random(N, H), random(H, N).t(), random(N, H, grad=False)
    inner = silu(gate) * up
    expected = torch.autograd.grad(inner, (gate, up), gradient)
    found = elementwise.swiglu_backward(gradient, gate.detach(), up.detach())
    for actual, wanted in zip(found, (inner.detach(), *expected), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_a_rotation_and_its_inverse() -> None:
    angle = torch.tensor([0.3, 1.1])
    cos, sin = (torch.cat([part, part])[None, None] for part in (angle.cos(), angle.sin()))
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    rotated = elementwise.rotate(x, cos, sin, -1)
    # (1, 0) turned by 0.3, and (0, 2) turned by 1.1.
    torch.testing.assert_close(
        rotated[0, 0], torch.stack([cos[0, 0, 0], -2 * sin[0, 0, 1], sin[0, 0, 0], 2 * cos[0, 0, 1]])
    )
    torch.testing.assert_close(elementwise.rotate(rotated, cos, sin, 1), x)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_softmax_and_its_gradient(temperature: float) -> None:
    logits, targets, gradient = random(N, H), torch.tensor([0, 7, 3, 3, 1, 5]), random(N, grad=False)
    expected = (logits / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    logprobs, logsumexp = elementwise.softmax_logprobs(logits.detach(), targets, temperature)
    torch.testing.assert_close(logprobs, expected.detach())
    (wanted,) = torch.autograd.grad(expected, logits, gradient)
    found = elementwise.logits_gradient(logits.detach(), targets, logsumexp, gradient, temperature, torch.float64)
    torch.testing.assert_close(found, wanted)


def test_without_a_compiler_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(function: object) -> object:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(torch, "compile", missing)
    elementwise._has_compiler.cache_clear()
    assert not elementwise._has_compiler() and not elementwise._has_compiler()
    assert [record.getMessage() for record in caplog.records] == [
        "GPU kernels cannot be compiled here, so updates are slower: Failed to find C compiler."
    ]
    elementwise._has_compiler.cache_clear()


def test_attention_alone_refuses_sums_without_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `ordered_gradients`; other operations may have no such order."""
    q, strict = random(1, 1, 3, 4), list[tuple[str, bool]]()

    def now(name: str) -> None:
        strict.append((name, not torch.is_deterministic_algorithms_warn_only_enabled()))

    attended = scaled_dot_product_attention(q, q, q)[:, :, 1:]  # a view of the kernel's output
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    ordered_gradients.with_ordered_gradients(attended)
    monkeypatch.undo()
    node = attended.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda _: now("attention"))
    q.register_hook(lambda _: now("after"))
    attended.register_hook(lambda _: now("before"))
    with ordered_gradients.ordered_gradients(torch.device("cuda")):
        attended.sum().backward()
    assert strict == [("before", False), ("attention", True), ("after", False)]
    assert not torch.are_deterministic_algorithms_enabled()
