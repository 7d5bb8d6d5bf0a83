"""Speeds of devices, and the time that a stage's work takes on them. All are assumptions, and you can replace them.

Peak rates come from the data sheets (NVIDIA: H200 SXM, H100 SXM, A100 80GB SXM; dense, without sparsity). The fraction
of the peak that is reached and the minimum time of a layer are assumed. Operations are counted as usual: two per weight
that a token passes through in the forward pass, twice that in the backward pass, plus attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.estimate.architecture import Architecture

ROWS_MAX = 256
"""Sequences that vLLM decodes at once by default."""
ENGINE_LAYER_SHARE = 0.2
"""`layer_s` is multiplied by this factor with vLLM's CUDA graphs."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one machine's CPU. Rates are per second, sizes in bytes."""

    name: str
    kind: str  # "cuda" | "cpu"
    memory: float
    operations_16: float  # in bfloat16
    operations_32: float  # in float32
    bandwidth: float  # memory bandwidth
    network: float  # bandwidth to devices on other machines
    host_memory: float = 256e9  # host memory per device: 2 TB for 8, as in NVIDIA's DGX machines
    learning_share: float = 0.4  # fraction of peak operations reached when many tokens are processed at once
    sampling_share: float = 0.5  # fraction of the bandwidth reached when each token reads all weights
    layer_s: float = 1e-4  # minimum seconds of a layer's forward pass

    def operations(self, number: int) -> float:
        return self.operations_16 if number == 2 else self.operations_32


@dataclass(frozen=True)
class Assumed:
    """Assumed values for what the settings do not determine. Token counts are means over the data."""

    prompt_tokens: float = 256
    completion_share: float = 0.5  # mean completion length divided by max_new_tokens
    kept_share: float = 0.35  # fraction of sampled completions kept for training, after filters and deduplication
    step_tokens: float = 30  # tokens per reasoning step (a line)
    text_bytes: float = 5  # bytes on disk per token, metadata included


DEVICES = {
    "H200": Device("H200", "cuda", 141e9, 989e12, 67e12, 4.8e12, 50e9),
    "H100": Device("H100", "cuda", 80e9, 989e12, 67e12, 3.35e12, 50e9),
    "A100": Device("A100", "cuda", 80e9, 312e12, 19.5e12, 2.04e12, 25e9),
    # One core with AVX2 at 3 GHz: 32 float32 operations per cycle.
    "cpu": Device("cpu", "cpu", 16e9, 1e11, 1e11, 1e10, 1e9, host_memory=16e9),
}


def forward_operations(a: Architecture, length: float) -> float:
    """Operations of the forward pass per token, for sequences of this length."""
    lookup = 0 if a.tied else a.vocabulary * a.hidden  # embeddings are looked up; the head is a matrix product
    width = a.heads * (a.latent.plain + a.latent.rotary if a.latent else a.head_width)
    return 2 * (a.weights(active=True) - lookup) + 2 * a.layers * width * length


def read_s(device: Device, a: Architecture, tokens: float, length: float, batch: float, number: int) -> float:
    """Seconds that one device needs for the forward pass of `tokens`, `batch` of them at a time."""
    computing = tokens * forward_operations(a, length) / (device.operations(number) * device.learning_share)
    return computing + tokens / batch * a.layers * device.layer_s


def learn_s(
    device: Device, a: Architecture, tokens: float, length: float, batch: float, number: int, again: bool
) -> float:
    """Seconds of the forward and backward pass; `again`: activations are recomputed (gradient checkpointing)."""
    return (4 if again else 3) * read_s(device, a, tokens, length, batch, number)


def sample_s(
    device: Device,
    a: Architecture,
    completions: float,
    prompt: float,
    steps: float,
    mean: float,
    rows: float,
    number: int,
    engine: bool,
) -> float:
    """Seconds that one device needs to sample `completions` of `mean` tokens, `rows` at a time. Each row takes `steps`
    tokens: the longest completion if rows wait for each other, the mean if an engine refills their slots."""
    rows = max(1.0, min(rows, completions))
    alive = rows if engine else rows * mean / steps
    read = number * (a.weights(active=rows == 1) + alive * a.cache_numbers * (prompt + mean / 2))
    reading = read / (device.bandwidth * device.sampling_share)
    computing = alive * forward_operations(a, prompt + mean / 2) / (device.operations(number) * device.learning_share)
    least = a.layers * device.layer_s * (ENGINE_LAYER_SHARE if engine else 1)
    return completions / rows * steps * (max(reading, computing) + least)
