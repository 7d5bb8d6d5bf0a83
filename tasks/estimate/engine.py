"""Memory of a vLLM in the trainer's or sampler's process: what it takes of each device, and what it needs to start."""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config.common import Hardware
from grpo.config.engines import VLLM, TextEngineSettings
from tasks.estimate.architecture import Architecture

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PASSING = 0.03
"""Share of a device that vLLM's own forward passes need."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each device. `weights`, `cache`, the keys and values of a longest sequence, and `passes`, what forward
    passes need, must fit into `taken`; else vLLM does not start."""

    taken: float
    weights: float
    cache: float
    passes: float = 0.0

    @property
    def room(self) -> float:
        """What is left beside weights and a longest sequence; negative if vLLM does not start."""
        return self.taken - self.weights - self.cache - self.passes


def sampling_engine(engine: TextEngineSettings | None, hardware: Hardware) -> TextEngineSettings | None:
    """What samples: `hardware.sampler` may name vLLM where no engine is set. `auto` counts as our own sampler."""
    return VLLM(kind="local") if engine is None and hardware.sampler == "vllm" else engine


def engine_memory(
    a: Architecture, settings: TextEngineSettings | None, dtype: str, memory: float, longest: int
) -> EngineMemory | None:
    """Memory of the engine on a device of `memory` bytes; None if it has devices of its own, or is no vLLM.

    `longest`: tokens of a prompt with its completion, which is what sampling needs. vLLM insists on a cache for
    `max_model_len`, if that is set.
    """
    if not isinstance(settings, VLLM) or settings.kind != "local":
        return None
    itemsize, split = _BYTES[settings.dtype or dtype], settings.tensor_parallel_size
    weights = a.weights() * itemsize / split
    # Heads are divided as far as there are any; the vectors of latent attention are on each device.
    shares = 1 if a.latent else min(split, a.key_heads)
    cache = (settings.max_model_len or longest) * a.cache_numbers * itemsize / shares
    if settings.kv_cache_gb is not None:  # then vLLM does not look at its share
        return EngineMemory(weights + settings.kv_cache_gb * 2**30, weights, cache)
    return EngineMemory(settings.gpu_memory_utilization * memory, weights, cache, PASSING * memory)
