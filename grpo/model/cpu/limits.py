"""Sizes that bound a model's memory. Does not import torch, so that memory estimates can read them cheaply."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 2**28}
"""Float32 logits held at once, in bytes by device type; on a GPU the least (`chunk_bytes`). On a CPU it stays below
32 MB, the limit up to which glibc reuses freed blocks instead of mapping new pages."""
KEPT_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""Softmax numerators kept for the backward pass, in bytes by device type. The rest are recomputed, at the cost of one
more product with the head."""
KEPT = 2**26
"""Largest number of weights of a bfloat16 head of which a CPU keeps a float32 copy: 256 MiB."""
CACHED_BYTES = 3 * 2**20
"""Logits that a softmax processes at once on a CPU, in bytes: they fit into its caches."""
MAX_ROWS = 48
"""Largest number of sequences sampled together for which prepacked weights pay off; beyond it arithmetic is the
bottleneck."""
MIN_STEPS = 128
"""Smallest number of decoding steps for which prepacking pays off."""
INITIAL_CACHE_TOKENS = 64
"""Initial capacity of a sequence's key-value cache, tokens. The capacity doubles when it is full."""


def chunk_bytes(kind: str, memory: float) -> int:
    """Float32 logits held at once on a device with this memory, in bytes. On a GPU each chunk reads and writes the
    gradient of the head once, so large ones are faster: up to 1 GB, and at most an 80th of the memory."""
    least = CHUNK_BYTES[kind]
    return least if kind == "cpu" else max(least, int(min(2**30, memory / 80)))
