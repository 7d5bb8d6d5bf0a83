"""Bytes that autograd keeps per token for the backward pass through one block."""

from __future__ import annotations

from tasks.estimate.architecture import Architecture


def activation_bytes(a: Architecture, itemsize: int, keys_per_token: float = 1.0, device: str = "cuda") -> float:
    """Bytes that autograd keeps per token in one block. `itemsize`: bytes per number, 4 or 2.

    `keys_per_token`: keys that attention gathers for each token; more than 1 if sequences share a prompt.
    """
    attended = 4 if device == "cpu" else itemsize  # `grpo.model.packed.scores`
    return _norms(a, itemsize) + _attention(a, itemsize, attended, keys_per_token) + _feed_forward(a, itemsize)


def _norms(a: Architecture, itemsize: int) -> float:
    # Two norms, each with its input, output and scale (`grpo.model.fused.layers`).
    return 2 * (2 * itemsize * a.hidden + 4)


def _attention(a: Architecture, itemsize: int, attended: int, keys_per_token: float) -> float:
    """`attended`: bytes per number that attention itself reads and writes."""
    # Queries, outputs, and outputs again in token order; keys and values, and a second copy behind their prompts if
    # prompts are shared; a logsumexp for each head.
    shares = keys_per_token + (keys_per_token > 1)
    if latent := a.latent:
        key = latent.plain + latent.rotary
        of_attention = a.heads * (key + latent.value + shares * (key + latent.value))
        others = a.heads * latent.value + 3 * (latent.query_rank or 0) + 3 * latent.key_rank
    else:
        of_attention = a.head_width * (2 * a.heads + 2 * shares * a.key_heads)
        others = a.head_width * a.heads
    return attended * of_attention + itemsize * others + 4 * a.heads


def _feed_forward(a: Architecture, itemsize: int) -> float:
    # Gate and up (`grpo.model.fused.layers`). An expert also keeps silu(gate) and the product, and has its own inputs
    # and outputs.
    if a.experts is None:
        return itemsize * 2 * a.feed_forward
    active = a.experts.active + a.experts.shared
    return itemsize * (active * 4 * a.experts.width + 2 * a.experts.active * a.hidden)


def adapter_bytes(a: Architecture, itemsize: int, rank: int) -> float:
    """The same for LoRA adapters, on top of it."""
    # peft keeps adapters in float32. So autograd keeps a float32 copy of every input of another type, the low-rank
    # products, and the input of the last linear layer, which is recomputed if that layer has no adapter.
    copies = sum(inputs for inputs, _ in a.adapted_linears) if itemsize == 2 else 0
    last = 0 if a.experts else itemsize * a.feed_forward
    return 4 * (copies + rank * len(a.adapted_linears)) + last


def merged_experts(a: Architecture, itemsize: int) -> float:
    """Bytes of a block's experts with their adapters added, which peft makes anew in each forward pass."""
    if a.experts is None or not a.experts.adapted:
        return 0
    return 3 * itemsize * a.hidden * a.experts.width * a.experts.count
