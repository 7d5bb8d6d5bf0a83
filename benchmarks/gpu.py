"""What a GPU makes of it: right, resumable, and how fast. For a machine with torch and transformers and no internet.

    python benchmarks/gpu.py [--device cuda] [--small] [--parts models step ...] [--total SECONDS] [--json FILE]
        [--write docs/gpu.md]

docs/gpu.md says how to prepare a machine and what the figures are held against.

| part       | what it does                                                                                        |
|------------|-----------------------------------------------------------------------------------------------------|
| models     | one tiny model of each kind: the probe, and `architectures.examine`, on the device                  |
| step       | four GRPO steps on the device and on the CPU from the same weights; sampler against trainer         |
| resume     | a GRPO job killed and started again ends with the weights of an undisturbed one, bit for bit        |
| waits      | how often the host waits for the GPU while it samples and updates                                     |
| shards     | a model read by shards onto the device against one loaded whole                                     |
| throughput | random weights in the shapes of 0.5B, 1.5B and 7B models: update, MFU, sampling, `generate`, memory |
| vllm       | sampling by vLLM at 1.5B, from the trainer and by itself, where it is installed                     |
| trl        | a GRPO step here and by TRL at 1.5B                                                                 |
| profile    | an update and sampling by kernel: the ten that take longest, and the share of time the device idles |
| trainer    | an update here and by transformers' Trainer at 1.5B                                                 |
| attention  | attention over packs by rows, as it is, and by FlexAttention                                          |
| recipes    | `tiny` from nothing to its evaluation, and with --model FOLDER every stage on a real model            |
| learning   | GRPO, of a pretrained model with --model FOLDER, until its reward rises                              |
| continuous | sampling by transformers' continuous batching at 1.5B                                               |

Each part runs in a process of its own, so that a failure or its memory does not touch the others. They run by
importance, as above, or in the order of --parts; those that --total leaves no time for are named. --json keeps the
parts that the file has from earlier runs, of the same machine only, and --write writes them all. --small takes shapes
that a CPU does in seconds: it tests this script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import mean
from typing import Any

from arguments import output_file
from gpu_beside import recipes, trainer, trl, vllm
from gpu_checks import models, shards, waits
from gpu_page import goals, write_page, wrong
from gpu_results import NO_TIME, earlier, keep, read_results
from gpu_run import run_parts
from gpu_throughput import SHAPES, SMALL_SHAPES, attention, continuous, profile, shaped_model, throughput
from machine import made_with

STEPS, LEARNING_RATE = 4, 1e-4
LEARNING_VOCABULARY = 512
COMPARED = ("reward", "loss", "grad_norm", "kl", "sampled_entropy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="shapes for a CPU: to test this script")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--model", type=Path, help="a pretrained model with a chat template, for recipes and learning")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES], help="of the part throughput")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which a part is stopped")
    parser.add_argument("--total", type=float, default=1500, help="seconds after which all parts have ended")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--write", type=output_file)
    parser.add_argument("--results", type=Path, nargs="+", help="files of --json: --write their parts, run nothing")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary folders are removed
        from grpo.processes.loading import never_collected

        with never_collected():  # as a trainer loads them
            import grpo.generation.sampler
            import grpo.model.logprobs  # noqa: F401
        print(json.dumps(PARTS[args.part](args)))
        return 0
    if args.results:
        if args.write is None:
            parser.error("--results: name the page with --write")
        try:
            write_page(args.write, [read_results(file) for file in args.results])
        except (OSError, ValueError) as error:
            parser.error(f"--results: {error}")
        return 0
    ends = time.perf_counter() + args.total
    try:
        results = earlier(args.json, machine_name(args.device))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    commit = made_with()["commit"]
    no_time = []
    for name, result in run_parts(args.parts, args.limit, ends):
        if result is None:
            no_time.append(name)
            continue
        results[name] = result | {"commit": commit}
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        keep(results, args.json)
    results |= {NO_TIME: no_time} if no_time else {}
    keep(results, args.json)
    if args.write:
        write_page(args.write, [results])
    for name, least, figure in goals(results):
        print(f"{name}: {'not measured' if figure is None else f'{figure:.2f}'}, goal {least:g}", flush=True)
    for check, figure in wrong(results):
        print(f"wrong: {check.name}: {figure:g}, at most {check.most:g}", flush=True)
    if no_time:
        print(f"no time left of {args.total:g} s for: {' '.join(no_time)}", flush=True)
    failed = any("error" in result for result in results.values() if isinstance(result, dict))
    return 1 if failed or wrong(results) else 0


def machine_name(device: str) -> str:
    """Of the device and the versions that its results depend on.

    Raises:
        ValueError: there is no such device.
    """
    import torch
    import transformers

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here; `--device cpu --small` tests this script without one")
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def write_rl_job(folder: Path, model: Path, device: str, prompts: int = 4, **changes: Any) -> Path:
    """A GRPO job on word problems with a cheap reward."""
    from grpo_step import Case, rl_settings
    from inputs import as_prompts, questions

    from grpo.data.records import Problem, write_rows

    folder.mkdir(parents=True, exist_ok=True)
    messages = as_prompts(questions(prompts, folder))
    problems = [Problem(str(i), m, "", "none", "reasoning", "en", "benchmark") for i, m in enumerate(messages)]
    write_rows(folder / "problems.parquet", problems, Problem)
    case = Case(str(folder), str(model), messages, 8, 32, 0.001, 4096, 8, 0, STEPS, 0)
    optimizer = {"learning_rate": LEARNING_RATE}
    hardware = {"device": device, "sampler": "own"}  # its samples depend on nothing but their seeds
    settings = {**rl_settings(case), "optimizer": optimizer, "save_every": 2, "hardware": hardware, **changes}
    files = {name: str(folder / name) for name in ("out", "state", "metrics", "result")}
    paths = {"model": str(model), "problems": [str(folder / "problems.parquet")]}
    path = folder / "job.json"
    path.write_text(json.dumps({"kind": "rl", "settings": settings, "seed": 0, **paths, **files}))
    return path


def run_job(path: Path, kill_after: int | None = None) -> list[dict[str, Any]]:
    """The job's metrics; it is killed once it has logged so many steps."""
    metrics = path.parent / "metrics"
    process = subprocess.Popen([sys.executable, "-m", "grpo.train", str(path)], stderr=subprocess.PIPE, text=True)
    while kill_after is not None and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= kill_after:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    _, errors = process.communicate()
    if process.returncode and kill_after is None:
        raise RuntimeError(errors[-2000:])
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "out" / "model.safetensors")


def step(args: argparse.Namespace) -> dict[str, Any]:
    """Largest difference of the weights after STEPS updates in units of the learning rate, metrics of the first step
    here and on the CPU, and mean and largest |log-probability| difference between sampler and trainer by type."""
    from inputs import demo_model

    with tempfile.TemporaryDirectory() as place:
        model = demo_model(Path(place))
        first: dict[str, Any] = {}
        after = {}
        for device in dict.fromkeys(("cpu", args.device)):
            folder = Path(place) / device
            records = run_job(write_rl_job(folder, model, device))
            first[device] = {name: records[0][name] for name in ("loss", "grad_norm", "reward", "logprob_mismatch")}
            after[device] = weights(folder)
        moved = max((after["cpu"][n] - w).abs().max().item() for n, w in after[args.device].items()) / LEARNING_RATE
        mismatch = {dtype: sampler_difference(model, args.device, dtype) for dtype in ("float32", "bfloat16")}
    return {"weights_lr": moved, "first_step": first, "sampler_difference": mismatch}


def sampler_difference(model: Path, device: str, dtype: str) -> dict[str, float]:
    """|log-probability while sampling - log-probability in training| of the tokens, nats."""
    import torch

    from grpo.config.common import Hardware, Sampling
    from grpo.generation.sampler import sample
    from grpo.model.loading import load_policy
    from grpo.model.logprobs import completion_logprobs

    policy = load_policy(str(model), Hardware(device=device, dtype=dtype))
    prompts = [[5 + (i * 7 + j) % 40 for j in range(12 + i)] for i in range(4)]
    groups = sample(policy, prompts, 4, Sampling(max_new_tokens=48), eos_id=10**6, seeds=[1, 2, 3, 4])
    rows = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    with torch.no_grad():
        trained = completion_logprobs(policy, [p for p, _ in rows], [c.tokens for _, c in rows], 1.0)
    sampled = torch.tensor([c.logprobs for _, c in rows])
    difference = (trained.float().cpu() - sampled).abs()
    return {"mean": difference.mean().item(), "largest": difference.max().item()}


def resume(args: argparse.Namespace) -> dict[str, Any]:
    """Whether a job that was killed and went on ends with the bits of one that was not, and whether a second
    undisturbed one does; and the first step of each whose metrics differ."""
    import torch
    from inputs import demo_model

    with tempfile.TemporaryDirectory() as place:
        model = demo_model(Path(place))
        jobs = {name: write_rl_job(Path(place) / name, model, args.device) for name in ("whole", "killed", "repeated")}
        with ThreadPoolExecutor() as pool:
            undisturbed = {name: pool.submit(run_job, jobs[name]) for name in ("whole", "repeated")}
            killed_after = len(run_job(jobs["killed"], kill_after=3))
            records = {"killed": run_job(jobs["killed"]), **{name: job.result() for name, job in undisturbed.items()}}
        whole = weights(jobs["whole"].parent)
        result: dict[str, Any] = {"killed_after": killed_after}
        for name in ("killed", "repeated"):
            again = weights(jobs[name].parent)
            same = all(torch.equal(w, again[key]) for key, w in whole.items())
            pairs = enumerate(zip(records["whole"], records[name], strict=True), 1)
            differs = next((step for step, (a, b) in pairs if any(a[key] != b[key] for key in COMPARED)), None)
            result[name] = {"same_bits": same, "first_step_that_differs": differs}
    return result | {"same_bits": all(result[name]["same_bits"] for name in ("killed", "repeated"))}


def learning(args: argparse.Namespace) -> dict[str, Any]:
    """Mean reward (share of letters) of the first and the last ten steps of GRPO, on --model, or on random weights in
    the 0.5B shape with a small vocabulary; and by step the rewards and how far sampler and trainer differ, nats."""
    steps = 4 if args.small else 40
    changes: dict[str, Any] = {"steps": steps, "group_size": 4 if args.small else 16, "prompts_per_step": 4}
    changes["save_every"] = steps
    changes["optimizer"] = {"learning_rate": 5e-5 if args.model is None else 1e-5}
    if args.device == "cuda":
        changes["hardware"] = {"device": "cuda", "dtype": "bfloat16", "mixed_precision": True}
    with tempfile.TemporaryDirectory() as place:
        shape = SMALL_SHAPES["small"] if args.small else SHAPES["0.5B"]
        model = args.model or shaped_model(Path(place), shape, "float32", LEARNING_VOCABULARY)
        path = write_rl_job(Path(place) / "job", model, args.device, **changes)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(run_job, path)
            while not wait([job], timeout=10).done:
                print(json.dumps(learned(path.parent / "metrics")), flush=True)  # if time runs out
            job.result()
        return learned(path.parent / "metrics")


def learned(metrics: Path) -> dict[str, Any]:
    """Of the steps that a job has logged so far: mean rewards, and between vLLM and the trainer, after each hand-over
    of weights, the mean |log-probability| difference of the sampled tokens, nats."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    if not steps:
        return {"rewards": []}
    rewards = [step["reward"] for step in steps]
    means = {"first": mean(rewards[:10]), "last": mean(rewards[-10:])}
    differences = [step["sampler_difference"] for step in steps if "sampler_difference" in step]
    return means | {"rewards": rewards, "sampler_difference": differences}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "models": models,
    "step": step,
    "resume": resume,
    "waits": waits,
    "shards": shards,
    "throughput": throughput,
    "vllm": vllm,
    "trl": trl,
    "profile": profile,
    "trainer": trainer,
    "attention": attention,
    "recipes": recipes,
    "learning": learning,
    "continuous": continuous,
}
"""By importance: a total that is too short leaves out the last."""

if __name__ == "__main__":
    sys.exit(main())
