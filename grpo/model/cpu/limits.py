"""Sizes that bound a model's memory, free of torch so that an estimate can read them without loading it."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 2**28}
"""Float32 logits held at once, in bytes by type of device: enough for full speed of the matrix product, small beside
any model. On a CPU it stays below 32 MB, up to which glibc reuses freed blocks instead of mapping new pages."""
KEPT_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""Softmax numerators kept for the backward pass, in bytes by type of device. Those beyond are recomputed, at the cost
of one more product with the head."""
CACHED_BYTES = {"cpu": 3 * 2**20, "cuda": 2**30}
"""Logits that a softmax processes at once, in bytes by type of device. On a CPU they fit into its caches."""
MAX_ROWS = 48
"""Sequences sampled side by side up to which prepacked weights pay off; beyond, arithmetic is the bottleneck."""
MIN_STEPS = 128
"""Decoding steps from which prepacking pays off."""
INITIAL_CACHE_TOKENS = 64
"""Tokens that a sequence's key-value cache has room for at first. The room doubles when it is full."""
