"""One side of benchmarks/grpo_vs_trl.py in a process of its own: python benchmarks/grpo_step.py SIDE CASE.json

SIDE is `trl`, `ours` or `agreement`; the last line is a JSON object. Each side loads its own libraries only, so that
memory is its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from extras import need
from grpo_case import ADAM_BETA2, CLIP, LEARNING_RATE, MAX_GRAD_NORM, Case, DeviceMemory, report, step_record
from machine import peak_flops_per_s
from trl_step import trl


class Stopwatch:
    """Seconds of functions by the name of their part, since `laps` was last asked."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, function: str, part: str) -> None:
        watched = getattr(owner, function)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return watched(*args, **options)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

        setattr(owner, function, timed)

    def laps(self) -> dict[str, float]:
        laps, self.seconds = self.seconds, {}
        return laps


def update_flops(model: str, prompts: list[int], group_size: int, completion_tokens: float) -> float:
    """What an update must compute for prompts of so many tokens, each once, and so many completion tokens: 2 operations
    a weight and token forward, 4 backward (the head for completion tokens only; the embedding is no product), and in
    attention 12 times width and layers for each token and token that it looks at (PaLM, appendix B)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        hollow = AutoModelForCausalLM.from_config(config)
    weights = sum(m.weight.numel() for m in hollow.modules() if isinstance(m, torch.nn.Linear))
    head = hollow.get_output_embeddings().weight.numel()
    length = completion_tokens / (len(prompts) * group_size)
    pairs = sum(p * p / 2 + group_size * length * (p + length / 2) for p in prompts)
    attention = 12.0 * config.num_hidden_layers * config.hidden_size * pairs
    return 6.0 * ((weights - head) * (sum(prompts) + completion_tokens) + head * completion_tokens) + attention


def rl_settings(case: Case) -> dict[str, Any]:
    narrow = {"dtype": "bfloat16", "mixed_precision": True} if case.device == "cuda" else {}
    return {
        "steps": case.warm_up + case.steps,
        "prompts_per_step": len(case.prompts),
        "group_size": case.group_size,
        "clip_eps_low": CLIP,
        "clip_eps_high": CLIP,
        "kl_coef": case.kl_coef,
        "std": "sample",  # TRL knows no other
        "sampling": {"temperature": 1.0, "max_new_tokens": case.max_new_tokens, "batch_size": case.rows},
        "rewards": {"grpo_case:reward": 1},
        "micro_batch_tokens": case.micro_batch_tokens,
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "adam_beta2": ADAM_BETA2,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "save_every": 10**6,
        "hardware": {"device": case.device, **narrow},
    }


def ours(case: Case) -> dict[str, Any]:
    """The trainer as a job; a step lasts from one line of its metrics to the next.

    The machine's speed wanders: matrix products before and after the timed steps say what it reaches."""
    import torch

    import grpo.rl.update
    from grpo.data.records import Problem, write_rows
    from grpo.data.template import prompt_tokens
    from grpo.model.loading import load_tokenizer
    from grpo.processes.metrics_log import Metrics
    from grpo.rl.collector import RolloutCollector
    from grpo.train import main

    folder = Path(case.folder)
    problems = [Problem(str(i), m, "", "none", "reasoning", "en", "benchmark") for i, m in enumerate(case.prompts)]
    write_rows(folder / "problems.parquet", problems, Problem)
    files = {name: str(folder / name) for name in ("out", "state", "metrics", "result")}
    job = {
        "kind": "rl",
        "settings": rl_settings(case),
        "model": case.model,
        "problems": [str(folder / "problems.parquet")],
        "seed": case.seed,
        **files,
    }
    (folder / "job.json").write_text(json.dumps(job))
    Path(files["metrics"]).unlink(missing_ok=True)
    starts, ends, peaks = list[float](), list[float](), list[float]()
    watch, laps = Stopwatch(), list[dict[str, float]]()
    watch.watch(RolloutCollector, "_measured", "reference")
    watch.watch(torch.Tensor, "backward", "backward")
    watch.watch(grpo.rl.update, "clip_grad_norm", "clip")
    watch.watch(torch.optim.AdamW, "step", "optimizer")
    log = Metrics.log

    def timed_log(self: Metrics, *args: Any, **values: Any) -> None:
        log(self, *args, **values)
        if str(self.path) != files["metrics"]:  # completions for the reader
            return
        ends.append(time.perf_counter())
        laps.append(watch.laps())
        if len(ends) in (case.warm_up, case.warm_up + case.steps):
            peaks.append(peak_flops_per_s())
        starts.append(time.perf_counter())

    Metrics.log = timed_log  # type: ignore[method-assign]
    if code := main([str(folder / "job.json")]):
        sys.exit(code)
    records = [json.loads(line) for line in Path(files["metrics"]).read_text().splitlines()]
    starts.insert(0, ends[0] - records[0]["sampling_s"] - records[0]["update_s"])
    steps = [
        step_record(end - start, record["completion_tokens"] * case.rows, parts_of(record, lap))
        for start, end, record, lap in zip(starts[:-1], ends, records, laps, strict=True)
    ]
    tokenizer = load_tokenizer(case.model)
    asked = [len(prompt_tokens(tokenizer, m, "chat")) for m in case.prompts]
    result = report(case, steps, sum(asked))
    flops = sum(update_flops(case.model, asked, case.group_size, step["tokens"]) for step in result["steps"])
    update_s = sum(step["parts"][part] for step in result["steps"] for part in UPDATE)
    return result | {"update_flops_per_s": flops / update_s, "peak_flops_per_s": mean(peaks)}


UPDATE = ("forward", "backward", "clip", "optimizer")


def parts_of(record: dict[str, Any], lap: dict[str, float]) -> dict[str, float]:
    """The parts of a step in seconds: what the metrics time as a whole, by what was timed within it."""
    lap = {**dict.fromkeys(UPDATE[1:], 0.0), **lap}  # where no answer is better than the others, nothing is updated
    forward = record["update_s"] - sum(lap[part] for part in UPDATE[1:])
    sampling = record["sampling_s"] - lap.get("reference", 0.0)
    return {"sampling": sampling, **lap, "forward": forward}


SIDES = {"trl": trl, "ours": ours}

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    side, case_file = sys.argv[1:]
    if side == "trl":
        need("trl")
    memory = DeviceMemory()
    result = SIDES[side](Case(**json.loads(Path(case_file).read_text())))
    print(json.dumps(result | {"device_gb": memory.peak_gb}))
