"""The measurements of benchmarks/growth.py: points of its axes, each a job for one process or several."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inputs import long_prompts

from grpo.data.records import Problem, write_rows
from grpo.model.loading import load_tokenizer

WARM_UP_TOKENS = 16


PARTS = ("sampling", "measuring", "update")


Record = dict[str, Any]


SHAPES = {  # layers, width, feed-forward, heads; the demo's vocabulary
    "2.3M": (5, 192, 528, 3),
    "10M": (8, 320, 880, 5),
    "39M": (12, 512, 1408, 8),
}


MODELS = ("demo", *SHAPES, "135M")


@dataclass(frozen=True)
class Step:
    """A GRPO step: its completions have a forced length, and its loss a KL penalty unless `more` sets that to 0."""

    model: str
    prompts: int
    prompt_tokens: int
    group_size: int
    max_new_tokens: int
    micro_batch_tokens: int
    processes: int = 1
    threads: int | None = None  # of each process; None: the machine's
    steps: int = 2  # timed ones
    more: Record = field(default_factory=dict)  # settings

    @property
    def parts(self) -> list[str]:
        return [part for part in PARTS if part != "measuring" or self.more.get("kl_coef") != 0]

    def job(self, model: Path, folder: Path) -> Record:
        messages = long_prompts(self.prompts, self.prompt_tokens, load_tokenizer(str(model)), folder)
        problems = [Problem(str(i), m, "", "none", "reasoning", "en", "benchmark") for i, m in enumerate(messages)]
        write_rows(folder / "problems.parquet", problems, Problem)
        return {"kind": "rl", "settings": self.settings, "model": str(model), "problems": [folder / "problems.parquet"]}

    @property
    def settings(self) -> Record:
        rows = self.prompts * self.group_size
        return {
            "steps": 1 + self.steps,
            "prompts_per_step": self.prompts,
            "group_size": self.group_size,
            "sampling": {"max_new_tokens": min(WARM_UP_TOKENS, self.max_new_tokens), "batch_size": rows},
            "max_new_tokens_from": {1: self.max_new_tokens},
            "rewards": {"grpo_case:reward": 1},
            "scoring": {"workers": 1},
            "micro_batch_tokens": self.micro_batch_tokens,
            "optimizer": {"learning_rate": 1e-6},
            "save_every": 10**6,
            **self.more,
        }

    def result(self, ranks: list[Record], folder: Path) -> Record:
        """Seconds and MB of the parts, of the slowest process and of the largest."""
        for part in self.parts:
            assert all(len(of["seconds"].get(part, ())) == 1 + self.steps for of in ranks), (part, ranks)
        seconds = {
            p: statistics.mean(max(of["seconds"][p][i + 1] for of in ranks) for i in range(self.steps))
            for p in self.parts
        }
        records = [json.loads(line) for line in (folder / "metrics").read_text().splitlines()][1:]
        assert all(r["completion_tokens"] == self.max_new_tokens for r in records), "a completion ended by itself"
        step_s = statistics.mean(r["sampling_s"] + r["update_s"] for r in records)
        tokens = self.prompts * self.group_size * self.max_new_tokens
        held = {p: max(max(of["peak_mb"][p][1:]) - of["idle_mb"] for of in ranks) for p in self.parts}
        return {"seconds": step_s, "parts": seconds, "tokens_per_s": tokens / step_s, "held_mb": held}


@dataclass(frozen=True)
class Samples:
    """A sampling job: 4 completions a problem, scored."""

    model: str
    rows: int
    max_new_tokens: int = 32
    prompt_tokens: int = 32
    processes: int = 1
    threads: int | None = None

    def job(self, model: Path, folder: Path) -> Record:
        messages = long_prompts(64, self.prompt_tokens, load_tokenizer(str(model)), folder)
        problems = [
            Problem(str(i), messages[i % 64], "", "none", "reasoning", "en", "benchmark") for i in range(self.rows // 4)
        ]
        write_rows(folder / "problems.parquet", problems, Problem)
        task = {
            "name": "task",
            "model": str(model),
            "policy": "growth",
            "problems": [folder / "problems.parquet"],
            "samples_per_problem": 4,
            "sampling": {"max_new_tokens": self.max_new_tokens, "batch_size": 256},
            "rewards": ["format"],
        }
        return {"kind": "sample", "tasks": [task], "shard_size": 64, "scoring": {"workers": 1}}

    def result(self, ranks: list[Record], folder: Path) -> Record:
        return _of_job(ranks, self.rows * self.max_new_tokens)


@dataclass(frozen=True)
class Demonstrations:
    """Supervised fine-tuning, one epoch."""

    model: str
    rows: int
    max_new_tokens: int = 32  # of a response, about
    prompt_tokens: int = 32
    processes: int = 1
    threads: int | None = None

    def job(self, model: Path, folder: Path) -> Record:
        import pyarrow as pa
        import pyarrow.parquet as pq

        messages = long_prompts(64, self.prompt_tokens, load_tokenizer(str(model)), folder)
        responses = long_prompts(64, self.max_new_tokens, load_tokenizer(str(model)), folder)
        rows = [{"messages": messages[i % 64], "completion": responses[i % 64][0]["content"]} for i in range(self.rows)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
        settings = {"epochs": 1, "batch_size": 64, "micro_batch_tokens": 2048, "optimizer": {"learning_rate": 1e-6}}
        return {"kind": "sft", "settings": settings, "model": str(model), "data": folder / "data.parquet"}

    def result(self, ranks: list[Record], folder: Path) -> Record:
        return _of_job(ranks, self.rows * (self.prompt_tokens + self.max_new_tokens))


def _of_job(ranks: list[Record], tokens: int) -> Record:
    seconds = max(of["job_s"] for of in ranks)
    held = {"job": max(of["last_mb"] - of["idle_mb"] for of in ranks)}
    return {"seconds": seconds, "parts": {"job": seconds}, "tokens_per_s": tokens / seconds, "held_mb": held}


Point = Step | Samples | Demonstrations


@dataclass(frozen=True)
class Axis:
    title: str
    unit: str  # of the axis
    fixed: str
    series: dict[str, dict[float, Point]]  # name -> value on the axis -> what is run


# Groups, whole or in parts, fill these micro-batches to 93% or more at every length of the first axis.
DEMO_STEP = Step("demo", prompts=8, prompt_tokens=32, group_size=8, max_new_tokens=32, micro_batch_tokens=2176, steps=3)


REAL_STEP = Step("135M", prompts=2, prompt_tokens=64, group_size=8, max_new_tokens=64, micro_batch_tokens=576)


OF_ANY_SIZE = replace(DEMO_STEP, prompts=2, micro_batch_tokens=512, steps=2)


def _along(step: Step, name: str, values: tuple[int, ...], **fixed: Any) -> dict[float, Point]:
    return {value: replace(step, **fixed, **{name: value}) for value in values}


AXES = {
    "length": Axis(
        "Length of the completions",
        "tokens of a completion",
        "demo: 8 prompts of 32 tokens x 8, micro-batches of 2,176 tokens; 135M: 2 prompts of 64 tokens x 8, "
        "micro-batches of 576. There are two or more at every length, full to 93% at least.",
        {
            "demo": _along(DEMO_STEP, "max_new_tokens", (32, 64, 128, 256)),
            "135M": _along(REAL_STEP, "max_new_tokens", (64, 128, 256), steps=1),
        },
    ),
    "group": Axis(
        "Group size",
        "completions of a prompt",
        "demo: 4 prompts of 128 tokens, completions of 32, micro-batches of 2,176; 135M: 1 prompt of 128 tokens, "
        "completions of 32, micro-batches of 576. A group's prompt is computed once.",
        {
            "demo": _along(DEMO_STEP, "group_size", (4, 8, 16, 32, 64), prompts=4, prompt_tokens=128),
            "135M": _along(REAL_STEP, "group_size", (4, 8, 16, 32), prompts=1, prompt_tokens=128, max_new_tokens=32),
        },
    ),
    "model": Axis(
        "Model size",
        "million parameters",
        "2 prompts of 32 tokens x 8 completions of 32, micro-batches of 512 tokens. Random weights and the demo's "
        "vocabulary of about 384, but for 135M: SmolLM2 with its 49,152.",
        {"GRPO": {number: replace(OF_ANY_SIZE, model=name) for number, name in enumerate(MODELS)}},  # values: see main
    ),
    "samples": Axis(
        "Number of samples",
        "samples",
        "The demo's model. Sampling: 4 completions of 32 tokens for each problem, 256 side by side, 256 a shard. SFT: "
        "an epoch, batches of 64 sequences of about 64 tokens. Seconds are the whole job's.",
        {
            "sampling": {rows: Samples("demo", rows) for rows in (512, 2048, 8192)},
            "SFT": {rows: Demonstrations("demo", rows) for rows in (512, 2048, 8192)},
        },
    ),
    "processes": Axis(
        "Number of processes",
        "processes",
        "FSDP2 over gloo on one machine, one thread each; the global batch stays as it is. demo: as for the length, 64 "
        "tokens; 135M: 2 prompts of 64 tokens x 8 completions of 32. Memory by phase is that of the larger process.",
        {
            "demo": _along(DEMO_STEP, "processes", (1, 2), threads=1, max_new_tokens=64),
            "135M": _along(REAL_STEP, "processes", (1, 2), threads=1, max_new_tokens=32, steps=1),
        },
    ),
}
