"""The page of benchmarks/sizes.py."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from growth_page import options, prose
from machine import measured_by
from sizes_fit import (
    ALL,
    CHOICES,
    CONFIGS,
    COUNTS,
    GB,
    GPUS,
    HELD,
    LENGTHS,
    PASSING,
    USABLE,
    Fit,
    recommended,
    smallest,
    smallest_gathered,
    too_large,
)

from tasks.estimate.architecture import Architecture


def toml(settings: dict[str, Any]) -> str:
    return "\n".join(["[reasoning_rl]", *(f"{name} = {_value(value)}" for name, value in settings.items())])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(of)}" for name, of in value.items()) + " }"
    return json.dumps(value)


TOLERANCE, OTHERS = 0.05, 96 * 2**20


"""Others: the tokenizer, and buffers of libraries."""


@dataclass(frozen=True)
class Checked:
    model: float
    measured: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.model) <= TOLERANCE * self.model + OTHERS


def markdown(checked: dict[str, dict[str, Checked]], args: argparse.Namespace) -> str:
    intro = f"""
    {measured_by(f"python benchmarks/sizes.py{options(args)}")} Numbers on this page come from the memory model,
    `tasks/estimate/memory.py`: it counts the tensors that a step keeps on each device, and is fitted to nothing. Only
    the first section is measured. **No size above 135M was trained on GPUs with these settings**: take them to start
    from.
    """
    lines = ["# Which settings for which model size", "", *prose(intro), *_check_section(checked, args), *_overview()]
    for name in CONFIGS:
        lines += _size(name)
    return "\n".join([*lines, *_limits()])


def _check_section(checked: dict[str, dict[str, Checked]], args: argparse.Namespace) -> list[str]:
    if not checked:
        return []
    wrong = [f"{name}: {phase}" for name, of in checked.items() for phase, c in of.items() if not c.holds]
    verdict = f"**Further off: {', '.join(wrong)}.**" if wrong else "All are."
    intro = f"""
    float32, {args.threads} thread(s): the most that a trainer's process held in each phase of a step
    beyond what it held before it loaded a model, in MB. The heap was out of use (`MALLOC_MMAP_THRESHOLD_=65536`): by
    default it keeps gaps, which the memory model does not count and [growth](growth.md) does. Every number should be
    within {TOLERANCE:.0%} and {OTHERS / 2**20:.0f} MB, which the tokenizer and buffers of libraries take. {verdict}
    """
    lines = ["## How far the model is right", "", *prose(intro)]
    lines += ["| | phase | model | measured | measured / model |", "|---|---|---|---|---|"]
    for name, phases in checked.items():
        for phase, c in phases.items():
            cells = (f"{c.model / 2**20:,.0f}", f"{c.measured / 2**20:,.0f}", f"{c.measured / c.model:.2f}")
            lines.append(f"| {name} | {phase} | {' | '.join(cells)} |")
    return [*lines, ""]


def _overview() -> list[str]:
    intro = f"""
    Prompts of {LENGTHS.prompt} tokens, completions of up to {LENGTHS.completion:,}, 32 problems x 16; arithmetic in
    bfloat16 on float32 weights (`mixed_precision`; LoRA on bfloat16 weights, its adapters in float32), vLLM in the
    trainer's process, asleep while it learns. Tried: 1, 2, 4, ... {COUNTS[-1]} devices, {USABLE:.0%} of whose memory
    may be used; without checkpointing first, then with it; micro-batches of 32,768 tokens first, then of 16,384. In
    brackets what fits on no number of devices: the phase, and the least that it holds on each, GB. The last column is
    what FSDP2 itself needs: the update alone, sampling and all else elsewhere.
    """
    lines = ["## The fewest devices", "", *prose(intro)]
    lines += [f"| weights | {' | '.join(CHOICES)} | the update alone |", "|---" * (len(CHOICES) + 2) + "|"]
    for name, config in CONFIGS.items():
        a = Architecture.from_config(config)
        cells = [_devices(a, choice, ALL) for choice in CHOICES] + [_devices(a, "all weights, penalty", ("update",))]
        lines.append(f"| {name}: {_count(a)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _devices(a: Architecture, choice: str, phases: tuple[str, ...]) -> str:
    cells: list[str] = []
    for gpu in GPUS:
        fit = smallest(a, choice, gpu, phases)
        cells.append(f"{fit.devices} x {gpu}" if fit else f"{gpu}: none ({too_large(a, choice, gpu, phases)})")
    return "<br>".join(cells)


def _count(a: Architecture) -> str:
    whole, active = a.weights(), a.weights(active=True)
    return f"{whole / 1e9:.3g} B" + (f", {active / 1e9:.3g} B active" if active != whole else "")


def _size(name: str) -> list[str]:
    a = Architecture.from_config(CONFIGS[name])
    lines = [f"## {name}", ""]
    best = recommended(a)
    if best is not None:
        lines += _settings(best[1], f"{best[0][0].upper()}{best[0][1:]}")
    if best is None or not best[0].startswith("all weights"):
        return [
            *lines,
            "No settings with vLLM on the trainer's devices train all its weights: see the last section.",
            "",
        ]
    return lines


def _settings(fit: Fit, title: str) -> list[str]:
    of, split = fit.memory, fit.settings["engine"]["tensor_parallel_size"]
    rows = {**{part: of.held[part] for part in HELD}, **{part: of.update[part] for part in PASSING}}
    rows = {part: size for part, size in rows.items() if size}
    copies = f"each copy of the model over {split} devices" if split > 1 else "a copy of the model on each device"
    intro = f"""
    {title}: {fit.devices} x {fit.gpu}. vLLM, {copies}, has cache for {fit.sequences} completions of full length at a
    time.
    """
    heads = [*rows, *(f"while {phase}" for phase in of.phases)]
    return [
        *prose(intro),
        "```toml",
        toml(fit.settings),
        "```",
        "",
        f"| GB on each device | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
        "| | " + " | ".join(f"{size / GB:.1f}" for size in [*rows.values(), *of.phases.values()]) + " |",
        "",
    ]


def _limits() -> list[str]:
    deepseek, llama = (Architecture.from_config(CONFIGS[name]) for name in ("DeepSeek-V3", "Llama-3.1-70B"))
    whole, large, divided = (
        smallest_gathered(a, layers) / GB for a, layers in ((llama, 1), (deepseek, 1), (deepseek, 8))
    )
    ratio = deepseek.weights() / deepseek.weights(active=True)
    reasons = [
        """**What is whole on each device.** To sample without vLLM, each device gathers the whole model. Apart from
        this, all models are read in shards and measure block by block: policy, reference, value and reward models.""",
        f"""**FSDP2's memory.** It brings together the weights of two blocks and the gradients of one. With the
        embeddings that is {whole:.0f} GB for Llama-3.1-70B, but {large:.0f} GB for DeepSeek-V3, each of whose blocks
        has {deepseek.largest_block / 1e9:.1f} B weights, on any number of devices. With its experts divided among
        eight (`hardware.tensor_parallel`) it is {divided:.0f} GB; small models have run so, in four processes.""",
        f"""**FSDP2's messages.** For each micro-batch a weight travels twice in bfloat16 and its gradient once in
        float32: 8 bytes, for 8 operations a token (with checkpointing). Where a device computes C operations a second
        and receives B bytes, messages hide behind arithmetic from C / B tokens a micro-batch on, for any size: 8,000
        for 400 TFLOP/s and 50 GB/s (assumed, not measured). Of DeepSeek-V3 a token passes 1 / {ratio:.0f} of the
        weights, so it takes {ratio:.0f} times as many tokens.""",
        """**The number of devices.** Each needs a micro-batch of its own in every step: 512 completions of 8,192 tokens
        are 256 micro-batches of 16,384. With more devices, some must share a sequence or the layers.""",
    ]
    verdict = """
    So dense models up to 70B need no pipeline: FSDP2, and vLLM with tensor parallelism, are enough. For DeepSeek-V3
    this library has expert parallelism, but not the pipelines that those who train it use beside it. What has them, by
    its own documentation (none of it was run here):
    """
    engines = [
        """[NeMo RL](https://docs.nvidia.com/nemo/rl/latest/design-docs/training-backends.html): GRPO; Megatron-Core as
        backend for models above 100 B, DTensor (FSDP2) below. For pretraining DeepSeek-V3 on 256 H100, NVIDIA's
        Megatron-Bridge divides tensors by 2, layers by 8 and experts by 32 (`deepseek_v3_pretrain_config_32nodes`).""",
        """[verl](https://verl.readthedocs.io/en/latest/perf/dpsk.html): GRPO with FSDP2 or Megatron; with Megatron it
        names DeepSeek-V3 on 96 GPUs of 96 GB, with optimizer state moved to the processors' memory.""",
        """[torchtitan](https://github.com/pytorch/torchtitan): FSDP2 with tensor, pipeline, context and expert
        parallelism in plain PyTorch, DeepSeek-V3 among its models; made for pretraining.""",
    ]
    lines = ["## Where FSDP2 alone ends", ""]
    for number, reason in enumerate(reasons, 1):
        lines += prose(reason, f"{number}. ")
    lines += ["", *prose(verdict)]
    for engine in engines:
        lines += prose(engine, "- ")
    return [*lines, ""]
