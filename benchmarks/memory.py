"""How much memory does each method need, and for how many models?

python benchmarks/memory.py [--model FOLDER] [--folder build/memory] [--output docs/measured/memory.md]

Two steps of GRPO without and with a penalty, GRPO with a reward model, and PPO, on a made Llama of the size of the
recipe `tiny` and on SmolLM2-135M (converted once by benchmarks/real_model.py, or --model). Peak resident memory of the
trainer's process; what Python and torch need before any model is loaded is measured too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from arguments import output_file, write_output
from machine import measured_by
from trainer_memory import trainer_mb
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, write_rows
from grpo.training.pretrain import train_tokenizer

GENERAL = {"general_last_steps": 2, "general_share": 0.5}
WEIGHTS = {"accuracy": 1, "format": 1}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    # name: (models in memory, settings, whether a reward model is loaded)
    "GRPO, no penalty, rule rewards": (("policy",), {"kl_coef": 0}, False),
    "GRPO, rule rewards": (("policy", "reference"), {}, False),
    "GRPO, reward model": (("policy", "reward", "reference"), {"rewards": {**WEIGHTS, "helpful": 1}}, True),
    "PPO, rule rewards": (("policy", "value", "reference"), {"method": "ppo"}, False),
    "PPO, reward model": (
        ("policy", "value", "reward", "reference"),
        {"method": "ppo", "rewards": {**WEIGHTS, "helpful": 1}},
        True,
    ),
}


def tiny(folder: Path) -> Path:
    """A Llama with random weights, of the size of the recipe's."""
    sums = [f"compute {a} + {b}\nfirst {a + b}" for a in range(10) for b in range(10)]
    settings = Pretrain(vocabulary=384, steps=1, optimizer=Optimizer(learning_rate=1e-3))
    tokenizer = train_tokenizer(sums, settings)
    shape = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_problems(path: Path) -> None:
    user = [{"role": "user", "content": "compute 4 - 1 + 7"}]
    reasoning = [Problem(f"r{i}", user, "10", "number", "reasoning", "en", "benchmark") for i in range(8)]
    general = [Problem(f"g{i}", user, "", "none", "general", "en", "benchmark") for i in range(8)]
    write_rows(path, [*reasoning, *general], Problem)


def peak_mb(name: str, model: Path, work: Path, settings: dict[str, Any], reward_model: bool) -> float:
    work.mkdir(parents=True, exist_ok=True)
    write_problems(work / "problems.parquet")
    base = {
        "steps": 2,
        "prompts_per_step": 2,
        "group_size": 4,
        "sampling": {"max_new_tokens": 32, "batch_size": 32},
        "micro_batch_tokens": 512,
        "optimizer": {"learning_rate": 1e-6},
        "save_every": 1000,
    }
    job = {
        "kind": "rl",
        "settings": base | (GENERAL if reward_model else {}) | settings,
        "model": model,
        "problems": [work / "problems.parquet"],
        "helpful_model": model if reward_model else None,  # its head is drawn at random: memory is all that counts
        "seed": 0,
        "out": work / "out",
        "state": work / "state",
        "metrics": work / "metrics.jsonl",
        "result": work / "result.json",
    }
    (work / "job.json").write_text(json.dumps(job, default=str))
    return trainer_mb(work / "job.json")


def markdown(rows: dict[str, list[tuple[str, float]]], sizes: dict[str, float], floor: float) -> str:
    lines = [
        "# Memory by method",
        "",
        measured_by("python benchmarks/memory.py"),
        "Peak resident memory of the trainer (VmHWM) over two steps of 2 problems x 4 completions of at most 32",
        "tokens, float32, AdamW, micro-batches of 512 tokens, in MB. An idle trainer (Python, torch, transformers)",
        f"holds {floor:.0f} MB; the number in brackets leaves that out.",
        "",
        "| method | models | " + " | ".join(f"{name} ({sizes[name]:.1f} M parameters)" for name in rows) + " |",
        "|---" * (len(rows) + 2) + "|",
    ]
    for i, (case, (models, _, _)) in enumerate(CASES.items()):
        cells = " | ".join(f"{result[i][1]:,.0f} ({result[i][1] - floor:,.0f})" for result in rows.values())
        lines.append(f"| {case} | {len(models)}: {', '.join(models)} | {cells} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/real_model/SmolLM2-135M-Instruct"))
    parser.add_argument("--folder", type=Path, default=Path("build/memory"))
    parser.add_argument("--output", type=output_file)
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model}: no model folder; run benchmarks/real_model.py once, or give --model")
    torch.manual_seed(0)
    models = {"tiny": tiny(args.folder / "tiny"), args.model.name: args.model}
    floor = trainer_mb()
    rows: dict[str, list[tuple[str, float]]] = {}
    sizes: dict[str, float] = {}
    for name, model in models.items():
        sizes[name] = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters()) / 1e6
        rows[name] = []
        for case, (_, settings, reward_model) in CASES.items():
            work = args.folder / name / case.replace(", ", "-").replace(" ", "_")
            rows[name].append((case, peak_mb(case, model.resolve(), work.resolve(), settings, reward_model)))
            print(f"{name}: {case}: {rows[name][-1][1]:,.0f} MB", file=sys.stderr, flush=True)
    text = markdown(rows, sizes, floor)
    print(text)
    if args.output:
        write_output(args.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
