"""Parts of benchmarks/gpu.py that check a device: architectures, reading by shards, and where the host waits for it."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_throughput import NEVER_ENDS, update_of

KINDS = ("llama", "qwen3", "gemma2", "cohere2", "granite", "gpt_oss", "deepseek_v3", "phi3", "qwen3_moe", "qwen3_next")
ROUNDING, LEAST = 3.0, 0.005
"""What bfloat16 may do to log-probabilities here, times what it does to transformers'; and nats that are always
allowed."""


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Way and largest differences of each kind in float32, and the same in bfloat16 (`in_bfloat16`)."""
    from architectures import examine

    rows = {}
    for kind in KINDS[:3] if args.small else KINDS:
        row = examine(kind, args.device)
        rows[kind] = {
            "way": row.way,
            "log-probabilities": row.logprobs,
            "gradients": row.gradients,
            "samples": row.samples,
            "note": row.note,
            "bfloat16": in_bfloat16(kind, args.device),
        }
    wrong = [kind for kind, row in rows.items() if row["way"] == "wrong" or is_wrong(row["bfloat16"])]
    return {"rows": rows, "wrong": wrong}


def in_bfloat16(kind: str, device: str) -> dict[str, Any]:
    """The way that a kind runs in bfloat16, and mean differences of log-probabilities, nats: from transformers in
    bfloat16; and of each from transformers in float32 ("rounding", "theirs")."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.tiny_models import COMPLETIONS, PROMPT_ROWS, alone, build
    from grpo.config.common import Hardware
    from grpo.model.lm_head import backbone_of
    from grpo.model.loading import load_policy
    from grpo.model.logprobs import completion_logprobs
    from grpo.model.packed.attention import is_packed

    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        build(kind, Path(place))
        expected = {}
        for dtype in (torch.float32, torch.bfloat16):
            own = AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager", dtype=dtype).to(device)
            rows = [alone(own, prompt, c) for prompt, c in zip(PROMPT_ROWS, COMPLETIONS, strict=True)]
            expected[dtype] = torch.cat(rows)
        policy = load_policy(place, Hardware(device=device, dtype="bfloat16"))
        found = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0).float()
    ours = torch.cat([row[: len(c)] for row, c in zip(found, COMPLETIONS, strict=True)])
    exact, theirs = expected.values()
    return {
        "way": "packed" if is_packed(backbone_of(policy)) else "plain",
        "difference": (ours - theirs).abs().mean().item(),
        "rounding": (ours - exact).abs().mean().item(),
        "theirs": (theirs - exact).abs().mean().item(),
    }


def is_wrong(narrow: dict[str, Any]) -> bool:
    """Whether bfloat16 here is farther from float32 than rounding allows, by what it does to transformers."""
    return not narrow["rounding"] <= ROUNDING * narrow["theirs"] + LEAST


def waits(args: argparse.Namespace) -> dict[str, Any]:
    """How often the host waits for the GPU, by `torch.cuda.set_sync_debug_mode`: in 64 steps of decoding with what
    comes before and after them, and in the forward and backward pass of an update. None on a CPU."""
    import torch
    from inputs import demo_model

    from grpo.config.common import Hardware, Sampling
    from grpo.generation.sampler import sample
    from grpo.model.loading import load_policy

    with tempfile.TemporaryDirectory() as place:
        policy = load_policy(str(demo_model(Path(place))), Hardware(device=args.device))
    prompts = [[5 + (i + j) % 40 for j in range(12)] for i in range(4)]
    settings = Sampling(max_new_tokens=64, top_p=0.95)
    runs: dict[str, Callable[[], Any]] = {
        "sampling": lambda: sample(policy, prompts, 4, settings, eos_id=NEVER_ENDS, seeds=[1, 2, 3, 4]),
        "update": update_of(policy, 1, 4, 12, 64, clipped=False),  # the norm of gradients is a wait, as it has to be
    }
    found: dict[str, int | None] = {}
    for name, run in runs.items():
        run()
        if args.device == "cpu":
            found[name] = None
            continue
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            run()
            torch.cuda.set_sync_debug_mode("default")
        found[name] = sum("synchroniz" in str(warning.message) for warning in seen)
    return found


def shards(args: argparse.Namespace) -> dict[str, Any]:
    """Largest difference of weights and gradients between a model read by shards and one loaded whole and then sharded:
    FSDP with one process, float32 weights, bfloat16 arithmetic. Gradients in units of the largest."""
    import torch
    from inputs import demo_model

    from grpo.config.common import Hardware
    from grpo.distributed.fsdp import local, shard
    from grpo.distributed.process_group import Parallel
    from grpo.model.loading import POLICY, load_policy
    from grpo.model.logprobs import completion_logprobs
    from grpo.model.sharded.loading import _read_shards

    hardware = Hardware(device=args.device)
    parallel, dtype = Parallel.alone(torch.device(args.device)), torch.bfloat16
    prompts = [[5 + (i + j) % 40 for j in range(12)] for i in range(4)]
    with tempfile.TemporaryDirectory() as place:
        folder = str(demo_model(Path(place)))
        # `load_sharded` would load the whole model for one process
        read = _read_shards(folder, hardware, parallel, POLICY, dtype, None, True, None)
        if read is None:
            return {"read_by_shards": False}
        models = {"read": read, "whole": shard(load_policy(folder, hardware), parallel, dtype=dtype)}
    found = {}
    for name, sharded in models.items():
        sharded(completion_logprobs, prompts, prompts, 1.0).sum().backward()
        parameters = dict(sharded.model.named_parameters())
        found[name] = {n: (local(p).detach(), local(p.grad)) for n, p in parameters.items()}
    pairs = [(found["whole"][name], pair) for name, pair in found["read"].items()]
    largest = max(gradient.abs().max().item() for (_, gradient), _ in pairs)
    return {
        "read_by_shards": True,
        "parameters": type(next(read.model.parameters())).__name__,
        "device": str(local(next(read.model.parameters())).device),
        "weights": max((a - b).abs().max().item() for (a, _), (b, _) in pairs),
        "gradients": max((a - b).abs().max().item() for (_, a), (_, b) in pairs) / largest,
    }
