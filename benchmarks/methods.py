"""Methods that the recipe is measured against: each from the same Dev1, on the same problems, for several seeds.

python benchmarks/methods.py [--seeds 0 1 2] [--folder build/methods] [--output docs/measured/methods.md]
    [--plot docs/measured/images/methods.png]

Every method gets as many steps and completions as GRPO. Results are kept in the folder, for each version of the recipe
and of the methods; a second call continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from arguments import output_file, write_output
from claims import Claims
from machine import measured_by
from recipe_version import r1_version

from flows.recipe.load import load_recipe
from grpo.data.records import read_samples
from tasks.evaluation.metrics import reasoning_metrics
from tasks.store.store import Store

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, process": {"supervision": "process", "step_reward": "reduction"},
    "grpo, no language reward": {"rewards": {"accuracy": 1.0, "format": 1.0}},
    "online rft": {"method": "online_rft"},
    "rft": {"method": "rft"},
    # At the rate of the others it pushes both completions of a pair down until nothing is right.
    "dpo": {"method": "dpo", "optimizer": {"learning_rate": 3e-5, "warmup_steps": 5}},
    "ppo, lambda 1.0": {"method": "ppo", "ppo": {"gae_lambda": 1.0, "value_learning_rate": 1e-3}},
    "ppo, lambda 0.95": {"method": "ppo", "ppo": {"gae_lambda": 0.95, "value_learning_rate": 1e-3}},
}
OFFLINE = ("rft", "dpo")
"""Their completions are the initial policy's throughout: the curve of these says nothing of what was learnt."""
CLAIMS = (  # (better, worse, what, source)
    ("online rft", "rft", "pass@1", "DSM 5.2.1"),
    ("grpo", "online rft", "pass@1", "DSM 5.2.1"),
    ("grpo, process", "grpo", "pass@1", "DSM 5.2.1"),
    ("ppo, lambda 1.0", "ppo, lambda 0.95", "pass@1", "R1 v2, supplement"),
    ("ppo, lambda 1.0", "ppo, lambda 0.95", "while training", "R1 v2, supplement"),
    ("grpo", "grpo, no language reward", "language", "R1, ablation"),
)
PAGE = Path("docs/measured/methods.md")


def r1(home: Path, *arguments: str) -> str:
    environment = {**os.environ, "R1FLOW_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def dev1(home: Path, seed: int) -> dict[str, Path]:
    """Problems and Dev1 of the recipe `tiny`, made by its own stages."""
    for stage in ("problems", "base", "cold_start_data", "cold_start_sft"):
        r1(home, "run", "tiny", "--seed", str(seed), "--only", stage, "--json")
    store = Store(home)
    return {name: store.resolve(f"latest:{name}").path for name in ("problems", "cold_start_sft")}


def train(kind: str, work: Path, **job: Any) -> dict[str, Any]:
    """One job of grpo/, or its result where it was done before."""
    result = work / "result.json"
    if not result.is_file():
        work.mkdir(parents=True, exist_ok=True)
        paths = {"out": work / "out", "state": work / "state", "metrics": work / "metrics.jsonl", "result": result}
        (work / "job.json").write_text(json.dumps({"kind": kind, **paths, **job}, default=str))
        with (work / "log").open("w") as log:
            subprocess.run(
                [sys.executable, "-m", "grpo.train", work / "job.json"],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
    return json.loads(result.read_text())


def evaluate(work: Path, model: Path, problems: Path, seed: int) -> dict[str, Any]:
    task = {
        "name": "held_out",
        "model": model,
        "policy": "benchmark",
        "problems": [problems / "held_out.parquet"],
        "first": {"reasoning": 256},
        "samples_per_problem": 4,
        "sampling": load_recipe("tiny").evaluate.sampling.model_dump(mode="json", exclude_unset=True),
    }
    train("sample", work, tasks=[task], seed=seed)
    return reasoning_metrics(read_samples(work / "out" / "held_out"), confidence=0.95)


def version() -> str:
    """8 hex digits that change with whatever decides the results: the recipe, with its evaluation, and the methods."""
    of = [r1_version("tiny"), VARIANTS]
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:8]


def measure(folder: Path, seed: int) -> dict[str, Any]:
    """Every variant for one seed: its evaluation and its learning curve."""
    of_seed = folder / f"seed-{seed}" / version()
    kept = of_seed / "results.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    missing = [name for name in ("dev1", *VARIANTS) if name not in results]
    if not missing:
        return results
    start = dev1(of_seed / "home", seed)
    settings = load_recipe("tiny", seed=seed).reasoning_rl.model_dump(mode="json", exclude_unset=True)
    for name in missing:
        work = of_seed / name.replace(", ", "-").replace(" ", "_")
        curve: list[dict[str, Any]] = []
        model = start["cold_start_sft"]
        if name != "dev1":
            problems = [start["problems"] / "train.parquet"]
            job = {"settings": settings | VARIANTS[name], "model": model, "problems": problems, "seed": seed}
            train("rl", work, **job)
            curve = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
            model = work / "out"
        metrics = evaluate(of_seed / f"evaluate-{work.name}", model, start["problems"], seed)
        results[name] = {"metrics": metrics, "curve": [r["reward_accuracy"] for r in curve]}
        write_output(kept, json.dumps(results))
        print(f"seed {seed}: {name}: pass@1 {metrics['pass@1']:.1%}", file=sys.stderr, flush=True)
    return results


def markdown(by_seed: dict[int, dict[str, Any]], plot: str | None) -> str:
    """The page. `plot`: the picture's place, from the page's folder."""
    seeds, sampling = list(by_seed), load_recipe("tiny").evaluate.sampling
    tuned = [seed for seed in seeds if seed in Claims.read().seeds.tuned_on]
    lines = [
        "# The methods beside each other",
        "",
        measured_by(f"python benchmarks/methods.py --seeds {' '.join(map(str, seeds))}"),
        "Each method starts from the Dev1 of the recipe `tiny` and gets 70 steps of 24 problems x 8 completions with",
        "the settings of its reasoning RL; only what the name says differs, but for DPO's rate. pass@1: mean of 4",
        f"samples at temperature {sampling.temperature:g} on 256 held-out problems, with a 95% bootstrap interval over",
        "problems; while training: accuracy of the sampled completions, mean over all steps, where they are the",
        "policy's own.",
        "",
        *(
            [f"Seeds on which the recipe's settings, and so GRPO's, were tuned: {', '.join(map(str, tuned))}.", ""]
            * bool(tuned)
        ),
        *([f"![Accuracy of the completions while training]({plot})", ""] if plot else []),
        "| method | "
        + " | ".join(f"pass@1, seed {s}" for s in seeds)
        + " | mean | while training | language | tokens |",
        "|---" * (len(seeds) + 5) + "|",
    ]
    for name in ("dev1", *VARIANTS):
        found = [by_seed[s][name]["metrics"] for s in seeds]
        cells = [f"{m['pass@1']:.1%} ({m['pass@1_ci95'][0]:.1%}-{m['pass@1_ci95'][1]:.1%})" for m in found]
        mean, language, tokens = (sum(m[k] for m in found) / len(found) for k in ("pass@1", "language", "mean_tokens"))
        curves = [by_seed[s][name]["curve"] for s in seeds]
        offline = name in ("dev1", *OFFLINE)
        training = "" if offline else f"{sum(map(training_accuracy, curves)) / len(curves):.1%}"
        lines.append(f"| {name} | {' | '.join(cells)} | {mean:.1%} | {training} | {language:.1%} | {tokens:.0f} |")
    lines += [
        "",
        "| claim | source | " + " | ".join(f"seed {s}, points" for s in seeds) + " | reproduced |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for better, worse, what, source in CLAIMS:
        points = [100 * (value(by_seed[s][better], what) - value(by_seed[s][worse], what)) for s in seeds]
        won = sum(p > 0 for p in points)
        verdict = "yes" if won == len(seeds) else f"no: {won} of {len(seeds)} seeds"
        cells = " | ".join(f"{p:+.1f}" for p in points)
        lines.append(f"| {better} over {worse}, {what} | {source} | {cells} | {verdict} |")
    lines += [
        "",
        "How to read it: RFT and online RFT are paid for right answers only, the others for format and language too,",
        "which the column language shows. RFT and DPO learn from completions of Dev1, the others from their own. DPO",
        "has a tenth of the others' learning rate, since at theirs it unlearns; no other rate was tuned.",
        "What a model of this size can reach is near, so a difference smaller than the intervals is none: a claim that",
        "is not reproduced here is not refuted at the size that it was made for.",
    ]
    return "\n".join([*lines, ""])


def value(result: dict[str, Any], what: str) -> float:
    return training_accuracy(result["curve"]) if what == "while training" else result["metrics"][what]


def training_accuracy(curve: list[float]) -> float:
    return sum(curve) / len(curve)


def draw(by_seed: dict[int, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name in VARIANTS:
        if name in OFFLINE:
            continue
        curves = [smooth(found[name]["curve"]) for found in by_seed.values()]
        steps = range(1, len(curves[0]) + 1)
        (line,) = axes.plot(steps, [sum(c) / len(c) for c in zip(*curves, strict=True)], label=name)
        lowest, highest = ([f(c) for c in zip(*curves, strict=True)] for f in (min, max))
        axes.fill_between(steps, lowest, highest, alpha=0.1, color=line.get_color())
    axes.set(xlabel="step", ylabel="accuracy of the sampled completions", title="mean and range over seeds")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def smooth(values: list[float], over: int = 5) -> list[float]:
    return [sum(values[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(values))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("build/methods"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--plot", type=output_file)
    args = parser.parse_args()
    by_seed = {seed: measure(args.folder.resolve(), seed) for seed in args.seeds}
    page = args.output or PAGE
    text = markdown(by_seed, os.path.relpath(args.plot, page.parent) if args.plot else None)
    print(text)
    if args.plot:
        draw(by_seed, args.plot)
    if args.output:
        write_output(args.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
