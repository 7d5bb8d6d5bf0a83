"""Throughput, memory and profile of benchmarks/gpu.py, on models of random weights in real shapes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

SHAPES = {
    "0.5B": dict(hidden=896, layers=24, heads=14, key_heads=2, feed_forward=4864, tied=True),
    "1.5B": dict(hidden=1536, layers=28, heads=12, key_heads=2, feed_forward=8960, tied=True),
    "7B": dict(hidden=3584, layers=28, heads=28, key_heads=4, feed_forward=18944, tied=False),
}
SMALL_SHAPES = {"small": dict(hidden=64, layers=2, heads=2, key_heads=1, feed_forward=128, tied=True)}
GROUPS = {"7B": 1}
"""Groups of completions of an update's one micro-batch, by shape; else 4. With one, activations are recomputed."""
VOCABULARY = 151_936
NEVER_ENDS = 10**6
"""A token past the vocabulary, as the one that ends completions."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 peak of GPUs by a part of their name, operations/s, from their data sheets."""
MAX_GRAD_NORM = 1.0
"""As by default in the trainer and in transformers' Trainer."""
SAMPLED = 2
"""How often each sampler is timed."""
AS_TRAINED = "as_trained"
"""Field of results whose updates run backward in a fixed order and clip gradients, as the trainer's do."""


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


def shaped_policy(args: argparse.Namespace) -> Any:
    """A policy in the 1.5B shape, or the small one, on the device."""
    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    shape, vocabulary = (SMALL_SHAPES["small"], 512) if args.small else (SHAPES["1.5B"], VOCABULARY)
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), shape, dtype, vocabulary)
        return load_policy(str(folder), Hardware(device=args.device, dtype=dtype))


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """For each shape, tokens/s of updates and of each sampler, MFU, and the most memory held, GB."""
    shapes = SMALL_SHAPES if args.small else {name: SHAPES[name] for name in args.shapes}
    results: dict[str, Any] = {}
    for name, shape in shapes.items():
        for result in of_shape(args, shape, GROUPS.get(name, 4)):
            results[name] = result
            print(json.dumps(results), flush=True)  # what there is, if time runs out
    return results


def of_shape(args: argparse.Namespace, shape: dict[str, Any], groups: int) -> Iterator[dict[str, Any]]:
    """The result so far, after each of its parts."""
    import torch
    from grpo_step import update_flops

    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy

    rows, prompt, length, new = (4, 16, 16, 16) if args.small else (16, 128, 384, 256)
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), shape, dtype, 512 if args.small else VOCABULARY)
        began = time.perf_counter()
        hardware = Hardware(device=args.device, dtype=dtype, gradient_checkpointing=groups == 1)
        policy = load_policy(str(folder), hardware)
        result: dict[str, Any] = {"load_s": time.perf_counter() - began}
        flops = update_flops(str(folder), [prompt] * groups, rows, groups * rows * length)
    policy.train()  # recomputes activations, if it should
    reset_memory(args.device)
    for count in dict.fromkeys((1, groups)):
        seconds = mean(times(args.device, update_of(policy, count, rows, prompt, length)))
        result[f"update_tokens_per_s_{count}_groups"] = count * (prompt + rows * length) / seconds
    result |= {"update_gb": peak_memory(args.device), AS_TRAINED: True}
    if peak := next((f for name, f in PEAK_FLOPS.items() if args.device == "cuda" and name in gpu_name()), None):
        result["mfu"] = flops / seconds / peak
    yield result
    policy.zero_grad()
    reset_memory(args.device)
    for name, run in samplers(policy, rows, prompt, new).items():
        result[f"{name}_tokens_per_s"] = 4 * rows * new / min(times(args.device, run, SAMPLED))
        result.setdefault("sampling_gb", peak_memory(args.device))
        yield result
    del policy
    if args.device == "cuda":
        torch.cuda.empty_cache()


def update_of(
    policy: Any, groups: int, rows: int, prompt: int, length: int, ordered: bool = True, clipped: bool = True
) -> Callable[[], None]:
    """Forward and backward pass over `groups` groups of `rows` completions at once, and an AdamW step. As in the
    trainer, gradients are `ordered`, their sums in a fixed order, and `clipped`, for which the host reads their
    norm."""
    import torch

    from grpo.distributed.fsdp import clip_grad_norm
    from grpo.model.logprobs import completion_logprobs
    from grpo.model.packed.ordered_gradients import ordered_gradients

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    prompts = [[5 + (i + group) % 90 for i in range(prompt)] for group in range(groups) for _ in range(rows)]
    completions = [[5 + (i * 13 + row) % 90 for i in range(length)] for row in range(groups * rows)]

    def run() -> None:
        loss = completion_logprobs(policy, prompts, completions, 1.0).sum()
        with ordered_gradients(policy.device) if ordered else nullcontext():
            loss.backward()
        if clipped:
            clip_grad_norm(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return run


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a forward pass over a group of completions, and of an update, with attention by rows as it is and
    by FlexAttention (`grpo.model.packed.flex`), which has no backward pass on a CPU; difference of the
    log-probabilities, nats."""
    import torch

    from grpo.model.logprobs import completion_logprobs
    from grpo.model.packed.flex import with_flex

    rows, prompt, length = (4, 16, 16) if args.small else (16, 128, 384)
    policy = shaped_policy(args)
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
                for field, ordered in (("update_ms", False), ("update_same_bits_ms", True)):
                    update = update_of(policy, 1, rows, prompt, length, ordered)
                    result[name][field] = 1e3 * min(times(args.device, update))
    return result


def samplers(policy: Any, rows: int, prompt: int, length: int) -> dict[str, Callable[[], Any]]:
    """Name of each sampler in this process and a run of it."""
    import torch

    from grpo.generation.plain_sampler import sample_groups_plain
    from grpo.model.loading import plain_attention

    prompts, settings, options = sampling_case(rows, prompt, length)

    @torch.inference_mode()
    def generate() -> None:
        with plain_attention(policy):
            list(sample_groups_plain(policy, prompts, rows, settings, **options))

    return {"sampling": sampling_of(policy, rows, prompt, length), "generate": generate}


def continuous(args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s of transformers' continuous batching at the 1.5B shape, for the completions of `throughput`."""
    from grpo.generation.continuous_batching import sample_continuously

    rows, prompt, new = (4, 16, 16) if args.small else (16, 128, 256)
    policy = shaped_policy(args)
    prompts, settings, options = sampling_case(rows, prompt, new)
    runs = times(args.device, lambda: list(sample_continuously(policy, prompts, rows, settings, **options)), SAMPLED)
    return {"tokens_per_s": 4 * rows * new / min(runs)}


def sampling_case(rows: int, prompt: int, length: int) -> tuple[list[list[int]], Any, dict[str, Any]]:
    """Prompts, settings and options of four groups of completions that never end by themselves."""
    from grpo.config.common import Sampling

    prompts = [[5 + (i * 7 + j) % 90 for j in range(prompt)] for i in range(4)]
    return prompts, Sampling(max_new_tokens=length, batch_size=4 * rows), dict(eos_id=NEVER_ENDS, seeds=[1, 2, 3, 4])


def sampling_of(policy: Any, rows: int, prompt: int, length: int) -> Callable[[], None]:
    from grpo.generation.sampler import sample_groups

    prompts, settings, options = sampling_case(rows, prompt, length)

    def run() -> None:
        list(sample_groups(policy, prompts, rows, settings, **options))

    return run


def environment(*folders: Path) -> dict[str, str]:
    """This process's variables, with `folders` first on Python's path."""
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def times(device: str, run: Callable[[], None], count: int = 3) -> list[float]:
    """Seconds of `count` runs after a warm-up, or of one run if `count` is 0."""
    import torch

    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:] or seconds


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
    """The ten kernels of an update and of sampling that take longest, as shares of the wall time, and what is left: the
    idle share."""
    rows, prompt, length, new = (4, 16, 16, 8) if args.small else (16, 128, 384, 32)
    policy = shaped_policy(args)
    runs = {"sampling": sampling_of(policy, rows, prompt, new), "update": update_of(policy, 1, rows, prompt, length)}
    return {name: by_kernel(args.device, run) for name, run in runs.items()}


def by_kernel(device: str, run: Callable[[], None]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = device == "cuda"
    wall = min(times(device, run, 2))
    with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        times(device, run, 0)
    events = seen.key_averages()
    seconds = {e.key: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 for e in events}
    top = sorted(seconds, key=lambda key: -seconds[key])[:10]
    return {
        "top": {f"{key[:110]} ({rank})": seconds[key] / wall for rank, key in enumerate(top, 1)},
        "kernels": sum(e.count for e in events),
        "idle_share": max(0.0, 1 - sum(seconds.values()) / wall),
        "wall_s": wall,
    }
