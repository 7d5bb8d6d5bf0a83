"""One side of benchmarks/grpo_vs_trl.py in a process of its own: python benchmarks/grpo_step.py SIDE CASE.json

SIDE is `trl`, `ours` or `agreement`; the last line is a JSON object. Each side loads its own libraries only, so that
memory is its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from machine import peak_flops_per_s
from measure import high_water_mb

LEARNING_RATE, ADAM_BETA2, MAX_GRAD_NORM = 1e-6, 0.95, 1.0
CLIP = 0.2


@dataclass(frozen=True)
class Case:
    """What both sides do: every step asks the same prompts."""

    folder: str
    model: str
    prompts: list[list[dict[str, str]]]
    group_size: int
    max_new_tokens: int
    kl_coef: float
    micro_batch_tokens: int  # ours: tokens of a micro-batch
    trl_rows: int  # TRL's: completions of a micro-batch
    warm_up: int
    steps: int  # timed, after the warm-up
    seed: int

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group_size

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))
        return path


def letters(text: str) -> float:
    """The reward of both sides, share of letters: cheap, and the completions of a group hardly ever agree in it."""
    return sum(map(str.isalpha, text)) / max(1, len(text))


def reward(problem: Any, response: Any) -> float:
    return letters(response.text)


reward.quick = True  # type: ignore[attr-defined]  # a group's completions in one go


def step_record(seconds: float, tokens: float, parts: dict[str, float]) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": tokens, "parts": parts}


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
        found, self.seconds = self.seconds, {}
        return found


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


def report(case: Case, steps: list[dict[str, Any]], prompt_tokens: int) -> dict[str, Any]:
    return {
        "steps": steps[case.warm_up :],
        "prompt_tokens": prompt_tokens,  # of one step, each prompt once
        "rows": case.rows,
        "high_water_mb": high_water_mb(),
    }


def rl_settings(case: Case) -> dict[str, Any]:
    return {
        "steps": case.warm_up + case.steps,
        "prompts_per_step": len(case.prompts),
        "group_size": case.group_size,
        "clip_eps_low": CLIP,
        "clip_eps_high": CLIP,
        "kl_coef": case.kl_coef,
        "std": "sample",  # TRL knows no other
        "sampling": {"temperature": 1.0, "max_new_tokens": case.max_new_tokens, "batch_size": case.rows},
        "rewards": {"grpo_step:reward": 1},
        "micro_batch_tokens": case.micro_batch_tokens,
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "adam_beta2": ADAM_BETA2,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "save_every": 10**6,
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
    watch.watch(RolloutCollector, "_measure", "reference")
    watch.watch(torch.Tensor, "backward", "backward")
    watch.watch(grpo.rl.update, "clip_grad_norm", "clip")
    watch.watch(torch.optim.AdamW, "step", "optimizer")
    log = Metrics.log

    def timed_log(self: Metrics, *args: Any, **values: Any) -> None:
        log(self, *args, **values)
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
        for start, end, record, lap in zip(starts, ends, records, laps, strict=False)
    ]
    tokenizer = load_tokenizer(case.model)
    asked = [len(prompt_tokens(tokenizer, m, "chat")) for m in case.prompts]
    found = report(case, steps, sum(asked))
    flops = sum(update_flops(case.model, asked, case.group_size, step["tokens"]) for step in found["steps"])
    update_s = sum(step["parts"][part] for step in found["steps"] for part in UPDATE)
    return found | {"update_flops_per_s": flops / update_s, "peak_flops_per_s": mean(peaks)}


UPDATE = ("forward", "backward", "clip", "optimizer")


def parts_of(record: dict[str, Any], lap: dict[str, float]) -> dict[str, float]:
    """The parts of a step in seconds: what the metrics time as a whole, by what was timed within it."""
    forward = record["update_s"] - sum(lap[part] for part in UPDATE[1:])
    sampling = record["sampling_s"] - lap.get("reference", 0.0)
    return {"sampling": sampling, **lap, "forward": forward}


def trl_arguments(case: Case) -> dict[str, Any]:
    """The same step; everything else as fast as TRL has it on a CPU."""
    return {
        "output_dir": str(Path(case.folder) / "trl"),
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": case.seed,
        "shuffle_dataset": False,
        "max_steps": case.warm_up + case.steps,
        "per_device_train_batch_size": case.trl_rows,
        "gradient_accumulation_steps": case.rows // case.trl_rows,
        "num_generations": case.group_size,
        "max_completion_length": case.max_new_tokens,
        "temperature": 1.0,
        "loss_type": "grpo",
        "beta": case.kl_coef,
        "use_bias_correction_kl": False,
        "epsilon": CLIP,
        "scale_rewards": "group",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta2": ADAM_BETA2,
        "max_grad_norm": MAX_GRAD_NORM,
    }


def make_trl_trainer(case: Case, trainer_class: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    def trl_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [letters(completion[0]["content"]) for completion in completions]

    return trainer_class(
        case.model,
        reward_funcs=trl_reward,
        args=GRPOConfig(**trl_arguments(case)),
        train_dataset=Dataset.from_dict({"prompt": case.prompts}),
    )


def trl(case: Case) -> dict[str, Any]:
    """TRL's own trainer; a step lasts from the end of one to the end of the next."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    parts: dict[str, float] = {}
    tokens: list[int] = []
    prompts: list[int] = []
    steps: list[dict[str, Any]] = []

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - began
        return result

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            result = timed("sampling", super()._generate, *args)
            prompts.append(sum(map(len, result[0])) // case.group_size)
            tokens.append(sum(map(len, result[1])))
            return result

        def _calculate_rewards(self, *args: Any) -> Any:
            return timed("rewards", super()._calculate_rewards, *args)

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
            forward = super()._get_per_token_logps_and_entropies
            if model is self.ref_model:
                return timed("reference", forward, model, *args, **options)
            return forward(model, *args, **options)

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            now = time.perf_counter()
            parts["update"] = now - self.last - sum(parts.values())
            steps.append(step_record(now - self.last, sum(tokens), dict(parts)))
            parts.clear()
            tokens.clear()
            self.last = now

    trainer = make_trl_trainer(case, Timed)
    trainer.add_callback(Clock())
    trainer.train()
    trainer.save_model(str(Path(case.folder) / "trl" / "model"))  # as ours does: it is part of the peak of memory
    return report(case, steps, prompts[0])


SIDES = {"trl": trl, "ours": ours}

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    side, case_file = sys.argv[1:]
    print(json.dumps(SIDES[side](Case(**json.loads(Path(case_file).read_text())))))
