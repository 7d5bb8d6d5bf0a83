"""benchmarks/gpu.py beside others: samplers, transformers' Trainer, and a GRPO step beside TRL's; those not installed
are left out. And whole recipes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from gpu_throughput import (
    AS_TRAINED,
    MAX_GRAD_NORM,
    SHAPES,
    SMALL_SHAPES,
    VOCABULARY,
    environment,
    peak_memory,
    reset_memory,
    sampling_case,
    shaped_model,
    times,
    update_of,
)

HERE = Path(__file__).parent
STARTING_S = 10.0
"""That a part's process may need before it begins, and to end."""
Prompts = list[list[int]]


def vllm(args: argparse.Namespace) -> dict[str, float]:
    """At the 1.5B shape, tokens/s of vLLM as the trainer uses it ("engine") and by itself ("vllm"; also with seeds, and
    with seeds and log-probabilities), for four groups of completions that do not end by themselves. Empty if it is not
    installed. The part `throughput` has the other samplers."""
    from grpo.generation.engine_choice import has_vllm

    if not has_vllm():
        return {}
    rows, prompt, length = (4, 16, 16) if args.small else (16, 128, 256)
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    prompts, settings, _ = sampling_case(rows, prompt, length)
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), chosen_shape(args), dtype, 512 if args.small else VOCABULARY)
        seconds = vllm_samplers(args, folder, dtype, prompts, rows, settings)
    return {name: 4 * rows * length / least for name, least in seconds.items()}


def chosen_shape(args: argparse.Namespace) -> dict[str, Any]:
    return SMALL_SHAPES["small"] if args.small else SHAPES["1.5B"]


def vllm_samplers(
    args: argparse.Namespace, folder: Path, dtype: str, prompts: Prompts, rows: int, settings: Any
) -> dict[str, float]:
    """Seconds of vLLM as the trainer uses it, and of its own `generate`, which makes no text of the tokens either."""
    from vllm import SamplingParams

    from grpo.config.engines import VLLM
    from grpo.generation.vllm.local import LocalVLLM

    last = (512 if args.small else VOCABULARY) - 1  # vLLM wants a token of the vocabulary; this one is rare
    engine = LocalVLLM(str(folder), VLLM(kind="local"), eos_id=last, dtype=dtype)
    common = dict(n=rows, temperature=1.0, max_tokens=settings.max_new_tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate(**further: Any) -> Callable[[], Any]:
        parameters = SamplingParams(**common, **further)
        return lambda: engine._llm.generate(asked, parameters, use_tqdm=False)

    runs: dict[str, Callable[[], Any]] = {
        "engine": lambda: list(engine.sample(prompts, rows, settings, [1, 2, 3, 4])),
        "vllm": generate(),
        "vllm_seeds": generate(seed=1),
        "vllm_seeds_logprobs": generate(seed=1, logprobs=0, flat_logprobs=True),
    }
    # In turns, because an engine is slower at first.
    rounds = [
        {name: min(times(args.device, run, 0)) for name, run in runs.items()} for _ in range(2 if args.small else 5)
    ]
    return {name: min(seconds[name] for seconds in rounds[1:]) for name in runs}


def trainer(args: argparse.Namespace) -> dict[str, Any]:
    """At the 1.5B shape, completion tokens/s and peak GB of an update on one group of completions, and of a step of
    transformers' Trainer on the same sequences, each with its prompt."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from grpo.config.common import Hardware
    from grpo.model.loading import load_policy

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    place = tempfile.TemporaryDirectory()
    folder = shaped_model(Path(place.name), chosen_shape(args), dtype, 512 if args.small else VOCABULARY)
    rows, prompt, length = (4, 16, 16) if args.small else (16, 128, 384)
    reset_memory(args.device)
    policy = load_policy(str(folder), Hardware(device=args.device, dtype=dtype))
    ours_s = mean(times(args.device, update_of(policy, 1, rows, prompt, length)))
    result = {"ours": {"tokens_per_s": rows * length / ours_s, "gb": peak_memory(args.device), AS_TRAINED: True}}
    del policy
    if importlib.util.find_spec("accelerate") is None:
        return result
    reset_memory(args.device)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    sequence = [5 + i % 90 for i in range(prompt + length)]
    data: Any = [{"input_ids": sequence, "labels": [-100] * prompt + sequence[prompt:]}] * (4 * rows)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            max_steps=4,
            per_device_train_batch_size=rows,
            learning_rate=1e-6,
            max_grad_norm=MAX_GRAD_NORM,
            use_cpu=args.device == "cpu",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Clock()]).train()
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    return result | {"trainer": {"tokens_per_s": rows * length / step_s, "gb": peak_memory(args.device)}}


def trl(args: argparse.Namespace) -> dict[str, Any]:
    """At the 1.5B shape, seconds of a GRPO step here and by TRL (benchmarks/grpo_step.py), and the most memory in use
    on the GPU, GB: float32 weights, on a GPU with bfloat16 arithmetic, and with vLLM in bfloat16 on both sides where it
    is installed. Each side has its share of the time that is left of the limit."""
    ends = time.perf_counter() + args.limit - STARTING_S
    dtype = "float32" if args.device == "cpu" else "bfloat16"  # TRL's vLLM takes the folder's
    with tempfile.TemporaryDirectory() as place:
        folder = shaped_model(Path(place), chosen_shape(args), dtype, 512 if args.small else VOCABULARY)
        return grpo_steps(args, folder, Path(place), ends)


def grpo_steps(args: argparse.Namespace, folder: Path, place: Path, ends: float) -> dict[str, Any]:
    from grpo_case import Case
    from inputs import as_prompts, questions

    prompts, group, length, rows = (2, 4, 12, 4) if args.small else (8, 16, 384, 16)
    asked = as_prompts(questions(prompts, place))
    sides = ["ours", *(["trl"] if importlib.util.find_spec("trl") else [])]
    result = {}
    for turn, side in enumerate(sides):
        share = max(0.0, ends - time.perf_counter()) / (len(sides) - turn)
        home = place / side
        steps = (1, 2)
        case = Case(str(home), str(folder), asked, group, length, 0.001, 8192, rows, *steps, 0, args.device)
        command = [sys.executable, str(HERE / "grpo_step.py"), side, str(case.write(home / "case.json"))]
        variables = environment(HERE.parent, HERE)
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=share)
        except subprocess.TimeoutExpired:
            result[side] = {"error": f"not done after {share:.0f} s"}
            continue
        if done.returncode:
            result[side] = {"error": done.stderr[-1500:]}
            continue
        report = json.loads(done.stdout.strip().splitlines()[-1])
        seconds = mean(step["seconds"] for step in report["steps"])
        parts = {part: mean(step["parts"][part] for step in report["steps"]) for part in report["steps"][0]["parts"]}
        gb = report["device_gb"] or report["high_water_mb"] / 1e3
        result[side] = {"seconds": seconds, "gb": gb, "torch_gb": report["gpu_gb"], "parts": parts}
        print(json.dumps(result), flush=True)
    return result


FEWER = ("base.documents=300", "base.pretrain.steps=4")


def recipes(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each stage of the recipe `tiny`, from nothing to the evaluation, and with --model of a few steps of
    every stage on it (benchmarks/real_model.py). --small makes the base model alone, in a few steps."""
    with tempfile.TemporaryDirectory() as home:
        variables = {**environment(HERE.parent), "R1FLOW_HOME": home}
        if args.device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "flows.cli", "run", "tiny", "--json"]
        if args.small:
            command += ["--only", "base", *(part for value in FEWER for part in ("--set", value))]
        result = {"tiny": stages_of(command, variables)}
        if args.model is not None:
            script = [sys.executable, str(HERE / "real_model.py"), "--model", str(args.model), "--json"]
            result["real_model"] = stages_of([*script, "--folder", f"{home}/real"], variables)
    return result


def stages_of(command: list[str], variables: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:5])}: {done.stderr[-1500:]}")
    stages = json.loads(done.stdout.strip().splitlines()[-1])["stages"]
    return stages if isinstance(stages, dict) else {stage["name"]: stage["seconds"] for stage in stages}
