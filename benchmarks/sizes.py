"""Which settings for which model size, out of the memory model (tasks/estimate/memory.py), and how far that is right.

    python benchmarks/sizes.py [--output docs/measured/sizes.md] [--check none] [--json]

The model's numbers for small models are held against what a trainer's process held in each phase of a step, on this
machine; the exit code is 1 where one is off by more than the tolerance. Then, for sizes from 135M to 671B, the smallest
number of devices whose memory every phase fits, by trying settings, and what they hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from growth import DEMO_STEP, REAL_STEP, Models, Step, measure, options, prose, say
from machine import machine

from grpo.config.rl import RL
from tasks.estimate.architecture import Architecture
from tasks.estimate.memory import DeviceMemory, Lengths, StepMemory, step_memory

QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    # Sizes as in config.json of these models on the Hugging Face hub, under its names.
    "SmolLM2-135M": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-0.5B": {
        **QWEN,
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        **QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        **QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "Qwen2.5-14B": {
        **QWEN,
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "Qwen2.5-32B": {
        **QWEN,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "Llama-3.1-70B": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V3": {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
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
            found = step_memory(a, RL.model_validate(settings), DeviceMemory("cuda", GPUS[gpu]), LENGTHS)
            yield Fit(settings, found, devices, gpu, engine[1])


def smallest(a: Architecture, choice: str, gpu: str, phases: tuple[str, ...]) -> Fit | None:
    """The first whose `phases` all fit."""
    return next((f for f in tried(a, choice, gpu, phases) if all(_fits(f, phase) for phase in phases)), None)


def _fits(fit: Fit, phase: str) -> bool:
    return fit.memory.phases[phase] <= USABLE * GPUS[fit.gpu]


ALL = ("loading", "sampling", "measuring", "update")


def too_large(a: Architecture, choice: str, gpu: str, phases: tuple[str, ...]) -> str:
    """Which phases fit on no number of devices, and what they hold at least."""
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


def toml(settings: dict[str, Any]) -> str:
    return "\n".join(["[reasoning_rl]", *(f"{name} = {_value(value)}" for name, value in settings.items())])


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(of)}" for name, of in value.items()) + " }"
    return json.dumps(value)


CHECKS: dict[str, Step] = {  # two micro-batches in each process
    "demo": replace(DEMO_STEP, prompts=16, max_new_tokens=128, micro_batch_tokens=8448, steps=1),
    "135M": replace(REAL_STEP, steps=1),
    "135M, no penalty": replace(REAL_STEP, steps=1, more={"kl_coef": 0.0}),
    "135M, checkpointing": replace(REAL_STEP, steps=1, more={"hardware": {"gradient_checkpointing": True}}),
    "135M, LoRA of rank 16": replace(REAL_STEP, steps=1, more={"lora": {"rank": 16}}),
    "135M, two processes": replace(REAL_STEP, steps=1, prompts=4, processes=2, more={"hardware": {"processes": 2}}),
}
NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
"""glibc's heap keeps gaps between tensors, a sixth more memory in some steps. With this (mallopt(3)) every larger block
is the kernel's own and goes back at once, so that what is measured is what is held."""
TOLERANCE, OTHERS = 0.05, 96 * 2**20
"""Others: the tokenizer, and buffers of libraries."""


@dataclass(frozen=True)
class Checked:
    model: float
    measured: float

    @property
    def holds(self) -> bool:
        return abs(self.measured - self.model) <= TOLERANCE * self.model + OTHERS


def check(names: list[str], given: argparse.Namespace) -> dict[str, dict[str, Checked]]:
    """Bytes held in each phase, of the memory model and of a process."""
    found: dict[str, dict[str, Checked]] = {}
    with tempfile.TemporaryDirectory(prefix="sizes-", dir=given.build.resolve()) as work:
        models = Models(given.build, Path(work))
        for number, name in enumerate(names):
            step = CHECKS[name]
            folder = models(step.model)
            shape = Architecture.from_config(json.loads((folder / "config.json").read_text()))
            measured = measure(step, folder, Path(work) / str(number), given.threads, **NO_HEAP)["held_mb"]
            settings = RL.model_validate({**step.settings, "rewards": {"accuracy": 1}})
            of = step_memory(
                shape, settings, DeviceMemory("cpu"), Lengths(step.prompt_tokens, step.max_new_tokens)
            ).phases
            found[name] = {phase: Checked(of[phase], mb * 2**20) for phase, mb in measured.items()}
            said = ", ".join(f"{p} {c.model / 2**20:,.0f} -> {c.measured / 2**20:,.0f}" for p, c in found[name].items())
            say(f"{name}: MB of the model -> measured: {said}")
    return found


def markdown(checked: dict[str, dict[str, Checked]], given: argparse.Namespace) -> str:
    intro = f"""
    `python benchmarks/sizes.py{options(given)}`. Numbers on this page come from the memory model,
    `tasks/estimate/memory.py`: it counts the tensors that a step keeps on each device, and is fitted to nothing. Only
    the first section is measured. **No size above 135M was trained on GPUs with these settings**: take them to start
    from.
    """
    lines = ["# Which settings for which model size", "", *prose(intro), *_check_section(checked, given), *_overview()]
    for name in CONFIGS:
        lines += _size(name)
    return "\n".join([*lines, *_limits()])


def _check_section(checked: dict[str, dict[str, Checked]], given: argparse.Namespace) -> list[str]:
    if not checked:
        return []
    wrong = [f"{name}: {phase}" for name, of in checked.items() for phase, c in of.items() if not c.holds]
    verdict = f"**Further off: {', '.join(wrong)}.**" if wrong else "All are."
    intro = f"""
    On {machine()}, float32, {given.threads} thread(s): the most that a trainer's process held in each phase of a step
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
    found = recommended(a)
    if found is not None:
        lines += _settings(found[1], f"{found[0][0].upper()}{found[0][1:]}")
    if found is None or not found[0].startswith("all weights"):
        without_loading = smallest(a, "all weights, no penalty", "80 GB", ("sampling", "update"))
        if without_loading is None:
            return [*lines, "No settings of this library train it: see the last section.", ""]
        loading = without_loading.memory.loading / GB
        title = f"All weights, no penalty: **does not load yet** ({loading:.0f} GB on each device), all else would fit"
        lines += _settings(without_loading, title)
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
    whole, large = smallest_gathered(llama) / GB, smallest_gathered(deepseek) / GB
    ratio = deepseek.weights() / deepseek.weights(active=True)
    reasons = [
        """**This library, before FSDP2.** Models are loaded whole on each device and divided there (and are whole in
        the processor's memory before, once a process); the reference, LoRA's base while it measures, and the sampler
        where there is no vLLM are brought together whole. So a device must hold a whole model, however many there are:
        `loading` and `measuring` above. With vLLM and `kl_coef` 0 loading alone is left.""",
        f"""**FSDP2's memory.** It brings together the weights of two blocks and the gradients of one. With the
        embeddings that is {whole:.0f} GB for Llama-3.1-70B, but {large:.0f} GB for DeepSeek-V3, each of whose blocks
        has {deepseek.largest_block / 1e9:.1f} B weights, on any number of devices. Its experts must stay divided
        (expert parallelism).""",
        f"""**FSDP2's messages.** For each micro-batch a weight travels twice in bfloat16 and its gradient once in
        float32: 8 bytes, for 8 operations a token (with checkpointing). Where a device computes C operations a second
        and receives B bytes, messages hide behind arithmetic from C / B tokens a micro-batch on, for any size: 8,000
        for 400 TFLOP/s and 50 GB/s (assumed, not measured). Of DeepSeek-V3 a token passes 1 / {ratio:.0f} of the
        weights, so it takes {ratio:.0f} times as many tokens.""",
        """**The number of devices.** Each needs a micro-batch of its own in every step: 512 completions of 8,192 tokens
        are 256 micro-batches of 16,384. With more devices, some must share a sequence or the layers.""",
    ]
    verdict = """
    So dense models up to 70B need no pipeline: FSDP2, and vLLM with tensor parallelism, would be enough for them if
    models need not be whole to be loaded. DeepSeek-V3 needs expert parallelism, and pipeline parallelism with it. This
    library has neither. What has, by its own documentation (none of it was run here):
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


def smallest_gathered(a: Architecture) -> float:
    engine = {"kind": "local"}
    settings = RL.model_validate(settings_of("all weights, no penalty", COUNTS[-1], True, MICRO_BATCHES[-1], engine))
    return step_memory(a, settings, DeviceMemory(), LENGTHS).update["gathered"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="append", choices=[*CHECKS, "none"], help="may be repeated; all by default")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.build.mkdir(parents=True, exist_ok=True)
    names = [name for name in given.check or CHECKS if name != "none"]
    checked = check(names, given) if names else {}
    text = markdown(checked, given)
    if given.output:
        given.output.write_text(text)
    print(text)
    holds = all(c.holds for of in checked.values() for c in of.values())
    if given.json:
        numbers = {
            name: {p: {"model": c.model, "measured": c.measured} for p, c in of.items()} for name, of in checked.items()
        }
        print(json.dumps({"holds": holds, "checked": numbers, "machine": machine()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
