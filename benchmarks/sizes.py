"""Which settings for which model size, out of the memory model (tasks/estimate/memory.py), and how far that is right.

    python benchmarks/sizes.py [--output docs/measured/sizes.md] [--check none] [--json]

The model's numbers for small models are held against what a trainer's process held in each phase of a step, on this
machine; the exit code is 1 where one is off by more than the tolerance. Then, for sizes from 135M to 671B, the smallest
number of devices whose memory every phase fits, by trying settings, and what they hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from arguments import at_least, output_file, write_output
from growth import measure, say
from growth_models import Models
from growth_points import DEMO_STEP, REAL_STEP, Step
from machine import machine
from sizes_page import Checked, markdown

from grpo.config.rl import RL
from tasks.estimate.architecture import Architecture
from tasks.estimate.memory import DeviceMemory, Lengths, step_memory

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


def check(names: list[str], args: argparse.Namespace) -> dict[str, dict[str, Checked]]:
    """Bytes held in each phase, of the memory model and of a process."""
    results: dict[str, dict[str, Checked]] = {}
    with tempfile.TemporaryDirectory(prefix="sizes-", dir=args.build.resolve()) as work:
        models = Models(args.build, Path(work))
        for number, name in enumerate(names):
            step = CHECKS[name]
            folder = models(step.model)
            shape = Architecture.from_config(json.loads((folder / "config.json").read_text()))
            measured = measure(step, folder, Path(work) / str(number), args.threads, **NO_HEAP)["held_mb"]
            settings = RL.model_validate({**step.settings, "rewards": {"accuracy": 1}})
            of = step_memory(
                shape, settings, DeviceMemory("cpu"), Lengths(step.prompt_tokens, step.max_new_tokens)
            ).phases
            results[name] = {phase: Checked(of[phase], mb * 2**20) for phase, mb in measured.items()}
            pairs = [f"{p} {c.model / 2**20:,.0f} -> {c.measured / 2**20:,.0f}" for p, c in results[name].items()]
            say(f"{name}: MB of the model -> measured: {', '.join(pairs)}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="append", choices=[*CHECKS, "none"], help="may be repeated; all by default")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.build.mkdir(parents=True, exist_ok=True)
    names = [name for name in args.check or CHECKS if name != "none"]
    checked = check(names, args) if names else {}
    text = markdown(checked, args)
    print(text)
    if args.output:
        write_output(args.output, text)
    holds = all(c.holds for of in checked.values() for c in of.values())
    if args.json:
        numbers = {
            name: {p: {"model": c.model, "measured": c.measured} for p, c in of.items()} for name, of in checked.items()
        }
        print(json.dumps({"holds": holds, "checked": numbers, "machine": machine()}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
