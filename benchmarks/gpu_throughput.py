"""Throughput, memory and profile of benchmarks/gpu.py, on models of random weights in real shapes."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

SHAPES = {
    "0.5B": dict(hidden=896, layers=24, heads=14, key_heads=2, feed_forward=4864, tied=True),
    "1.5B": dict(hidden=1536, layers=28, heads=12, key_heads=2, feed_forward=8960, tied=True),
    "7B": dict(hidden=3584, layers=28, heads=28, key_heads=4, feed_forward=18944, tied=False),
}
SMALL_SHAPES = {"small": dict(hidden=64, layers=2, heads=4, key_heads=2, feed_forward=128, tied=True)}
VOCABULARY = 151_936
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 peak of GPUs by a part of their name, operations/s, from their data sheets."""


def shaped_model(folder: Path, shape: dict[str, Any], dtype: str, vocabulary: int) -> Path:
    """A Qwen2 of random weights; its tokenizer is the demo's."""
    import torch
    from inputs import demo_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = demo_model(folder)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=shape["hidden"],
        intermediate_size=shape["feed_forward"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key_heads"],
        tie_word_embeddings=shape["tied"],
        max_position_embeddings=4096,
    )
    out = folder / "shaped"
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(out)
    for file in (*tokenizer.glob("*token*"), *tokenizer.glob("chat_template*")):
        (out / file.name).write_bytes(file.read_bytes())
    return out


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of updates and of sampling for each shape, MFU, and the most memory held, GB."""
    shapes = SMALL_SHAPES if args.small else SHAPES
    return {name: of_shape(args, shape) for name, shape in shapes.items()}


def of_shape(args: argparse.Namespace, shape: dict[str, Any]) -> dict[str, Any]:
    import torch
    from grpo_step import update_flops

    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy

    rows, prompt, length = (4, 16, 16) if args.small else (16, 128, 384)
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), shape, dtype, 512 if args.small else VOCABULARY)
        began = time.perf_counter()
        policy = load_policy(str(folder), Hardware(device=args.device, dtype=dtype))
        load_s = time.perf_counter() - began
        reset_memory(args.device)
        update_s = mean(times(args.device, update_of(policy, rows, prompt, length)))
        update_memory = peak_memory(args.device)
        flops = update_flops(str(folder), [prompt], rows, rows * length)
        reset_memory(args.device)
        sampling = sampling_speeds(args, policy, rows, prompt, 16 if args.small else 256)
    result = {"load_s": load_s, "update_tokens_per_s": (prompt + rows * length) / update_s, **sampling}
    result |= {"update_gb": update_memory, "sampling_gb": peak_memory(args.device)}
    if peak := next((f for name, f in PEAK_FLOPS.items() if args.device == "cuda" and name in gpu_name()), None):
        result["mfu"] = flops / update_s / peak
    del policy
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return result


def update_of(policy: Any, rows: int, prompt: int, length: int) -> Callable[[], None]:
    """Forward and backward of a group's completions and an AdamW step."""
    import torch

    from grpo.model.logprobs import completion_logprobs

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    prompts = [[5 + i % 90 for i in range(prompt)]] * rows
    completions = [[5 + (i * 13 + row) % 90 for i in range(length)] for row in range(rows)]

    def run() -> None:
        completion_logprobs(policy, prompts, completions, 1.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a forward pass over a group of completions, and of an update, with attention by rows as it is and
    by FlexAttention (`grpo.model.packed.flex`), which has no backward pass on a CPU; difference of the
    log-probabilities, nats."""
    import torch

    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy
    from grpo.model.logprobs import completion_logprobs
    from grpo.model.packed.flex import with_flex

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    rows, prompt, length = (4, 16, 16) if args.small else (16, 128, 384)
    with tempfile.TemporaryDirectory() as place:
        shape = SMALL_SHAPES["small"] if args.small else SHAPES["1.5B"]
        folder = shaped_model(Path(place), shape, dtype, 512 if args.small else VOCABULARY)
        policy = load_policy(str(folder), Hardware(device=args.device, dtype=dtype))
    prompts = [[5 + i % 90 for i in range(prompt)]] * rows
    completions = [[5 + (i * 13 + row) % 90 for i in range(length)] for row in range(rows)]

    @torch.no_grad()
    def forward() -> Any:
        return completion_logprobs(policy, prompts, completions, 1.0)

    result: dict[str, Any] = {"difference": forward()}
    for name, way in (("rows", nullcontext()), ("flex", with_flex())):
        with way:
            result[name] = {"forward_ms": 1e3 * min(times(args.device, forward))}
            if name == "flex":
                result["difference"] = (result["difference"] - forward()).abs().max().item()
            if args.device == "cuda":
                result[name]["update_ms"] = 1e3 * min(times(args.device, update_of(policy, rows, prompt, length)))
    return result


def sampling_speeds(args: argparse.Namespace, policy: Any, rows: int, prompt: int, length: int) -> dict[str, float]:
    """Tokens/s of this project's sampler and of transformers' `generate` for groups of `rows` completions."""
    import torch

    from grpo.config.common import Sampling
    from grpo.generation.plain_sampler import sample_groups_plain
    from grpo.generation.sampler import sample_groups
    from grpo.model.loading import plain_attention

    prompts = [[5 + (i * 7 + j) % 90 for j in range(prompt)] for i in range(4)]
    settings = Sampling(max_new_tokens=length, batch_size=4 * rows)
    options = dict(eos_id=10**6, seeds=[1, 2, 3, 4])

    def ours() -> None:
        list(sample_groups(policy, prompts, rows, settings, **options))

    @torch.inference_mode()
    def plain() -> None:
        with plain_attention(policy):
            list(sample_groups_plain(policy, prompts, rows, settings, **options))

    tokens = 4 * rows * length
    return {
        "sampling_tokens_per_s": tokens / min(times(args.device, ours, 2)),
        "generate_tokens_per_s": tokens / min(times(args.device, plain, 2)),
    }


def times(device: str, run: Callable[[], None], count: int = 3) -> list[float]:
    """Seconds of `count` runs after a warm-up."""
    import torch

    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def reset_memory(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> float | None:
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """The ten kernels of an update that take longest, as shares of its wall time, and what is left: the idle share."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy

    shape = SMALL_SHAPES["small"] if args.small else SHAPES["1.5B"]
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), shape, dtype, 512 if args.small else VOCABULARY)
        policy = load_policy(str(folder), Hardware(device=args.device, dtype=dtype))
    run = update_of(policy, *((4, 16, 16) if args.small else (16, 128, 384)))
    times(args.device, run, 1)
    activities = [ProfilerActivity.CUDA] if args.device == "cuda" else [ProfilerActivity.CPU]
    with profiler(activities=activities) as seen:
        wall = times(args.device, run, 1)[0]
    on_gpu = args.device == "cuda"
    seconds = {
        e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 2e6 for e in seen.key_averages()
    }
    top = sorted(seconds.items(), key=lambda item: -item[1])[:10]
    busy = sum(seconds.values())
    return {"top": {key[:80]: s / wall for key, s in top}, "idle_share": max(0.0, 1 - busy / wall), "wall_s": wall}
