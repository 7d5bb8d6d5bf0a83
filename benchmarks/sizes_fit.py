"""The smallest number of devices that the settings of a size fit on, by tasks/estimate/memory.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo.config.rl import RL
from tasks.estimate.architecture import Architecture
from tasks.estimate.memory import DeviceMemory, Lengths, StepMemory, step_memory
from tasks.estimate.published import PUBLISHED

CONFIGS = {name.partition("/")[2]: config for name, config in PUBLISHED.items()}
"""By the name without its organisation."""


LENGTHS = Lengths(prompt=512, completion=8192)


GPUS = {"80 GB": 80e9, "141 GB": 141e9}


USABLE = 0.9


"""Of a device's memory; the rest is left to CUDA, NCCL and what the allocator cannot give out."""


COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


A_NODE = 8


MICRO_BATCHES = (32768, 16384)


MIXED = {"dtype": "bfloat16", "mixed_precision": True}


CHOICES: dict[str, dict[str, Any]] = {  # from the best to the smallest
    "all weights, penalty": {"hardware": MIXED},
    "all weights, penalty, 8-bit moments": {"hardware": MIXED, "optimizer": {"kind": "adamw_8bit"}},
    "all weights, no penalty": {"hardware": MIXED, "kl_coef": 0.0},
    "LoRA of rank 32, penalty": {"hardware": {"dtype": "bfloat16"}, "lora": {"rank": 32, "alpha": 64}},
}


RATES = {"all weights": 1e-6, "LoRA": 1e-5}


HELD = ("weights", "optimizer", "reference")


PASSING = ("gradients", "activations", "head or block", "gathered")


GB = 1e9


@dataclass(frozen=True)
class Fit:
    settings: dict[str, Any]  # of reasoning_rl
    memory: StepMemory
    devices: int
    gpu: str
    sequences: int  # of LENGTHS that a vLLM engine has cache for


def settings_of(choice: str, devices: int, checkpointing: bool, tokens: int, engine: dict[str, Any]) -> dict[str, Any]:
    more = CHOICES[choice]
    rate = next(rate for name, rate in RATES.items() if choice.startswith(name))
    return {
        "steps": 1000,
        "prompts_per_step": 32,
        "group_size": 16,
        "kl_coef": more.get("kl_coef", 0.001),
        "sampling": {"max_new_tokens": LENGTHS.completion},
        "engine": engine,
        "micro_batch_tokens": tokens,
        "optimizer": {**more.get("optimizer", {}), "learning_rate": rate},
        **({"lora": more["lora"]} if "lora" in more else {}),
        "hardware": {
            **more["hardware"],
            "gradient_checkpointing": checkpointing,
            "processes": min(devices, A_NODE),
            "nodes": -(-devices // A_NODE),
        },
    }


def engine_for(a: Architecture, gpu: float, devices: int) -> tuple[dict[str, Any], int] | None:
    """vLLM beside the trainer with room for a group of the longest completions, and for how many it has; None where
    there are too few devices."""
    split = next((s for s in (1, 2, 4, 8) if a.weights() * 2 / s <= 0.35 * gpu and a.heads % s == 0), None)
    if split is None or split > devices:
        return None
    cache = 2 * a.cache_numbers * (LENGTHS.prompt + LENGTHS.completion) / min(split, a.key_heads)
    other = a.weights() * 2 / split + 0.03 * gpu
    share = next((s / 20 for s in range(6, 15) if s / 20 * gpu >= other + 16 * cache), None)
    if share is None:
        return None
    engine = {
        "kind": "local",
        "tensor_parallel_size": split,
        "gpu_memory_utilization": share,
        "max_model_len": LENGTHS.prompt + LENGTHS.completion,
    }
    return engine, int((share * gpu - other) / cache)


SERVER = ({"kind": "server"}, 0)


def tried(a: Architecture, choice: str, gpu: str, phases: tuple[str, ...]) -> Iterator[Fit]:
    """From the fewest devices on; on as many, what is faster first. Whoever does not ask for sampling leaves it to a
    server elsewhere."""
    for devices, checkpointing, tokens in itertools.product(COUNTS, (False, True), MICRO_BATCHES):
        if engine := engine_for(a, GPUS[gpu], devices) if "sampling" in phases else SERVER:
            settings = settings_of(choice, devices, checkpointing, tokens, engine[0])
            memory = step_memory(a, RL.model_validate(settings), DeviceMemory("cuda", GPUS[gpu]), LENGTHS)
            yield Fit(settings, memory, devices, gpu, engine[1])


def smallest(a: Architecture, choice: str, gpu: str, phases: tuple[str, ...]) -> Fit | None:
    """The first whose `phases` all fit."""
    return next((f for f in tried(a, choice, gpu, phases) if all(_fits(f, phase) for phase in phases)), None)


def _fits(fit: Fit, phase: str) -> bool:
    return fit.memory.phases[phase] <= USABLE * GPUS[fit.gpu]


ALL = ("loading", "sampling", "measuring", "update")


def too_large(a: Architecture, choice: str, gpu: str, phases: tuple[str, ...]) -> str:
    """Phases that fit on no number of devices, each with the least memory that it needs, GB."""
    fits = [*tried(a, choice, gpu, phases)]
    if not fits:
        return "vLLM over 8"
    least = {phase: min(f.memory.phases[phase] for f in fits) for phase in phases}
    over = [f"{phase} {size / GB:.0f}" for phase, size in least.items() if size > USABLE * GPUS[gpu]]
    return ", ".join(over) or "together"


def recommended(a: Architecture) -> tuple[str, Fit] | None:
    """The best choice that fits 80 GB, or else 141 GB."""
    for gpu, choice in itertools.product(GPUS, CHOICES):
        if fit := smallest(a, choice, gpu, ALL):
            return choice, fit
    return None


def smallest_gathered(a: Architecture, layers: int) -> float:
    """Bytes of weights and gradients that a process gathers if `layers` processes divide each layer."""
    fields = settings_of("all weights, no penalty", COUNTS[-1], True, MICRO_BATCHES[-1], {"kind": "local"})
    settings = RL.model_validate({**fields, "hardware": {**fields["hardware"], "tensor_parallel": layers}})
    return step_memory(a, settings, DeviceMemory(), LENGTHS).update["gathered"]
