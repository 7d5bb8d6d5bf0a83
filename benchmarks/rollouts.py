"""Grouped sampling with SmolLM2-135M: ours against transformers.generate and vLLM on this machine's CPU.

    make vllm; python benchmarks/rollouts.py [--rollouts 4] [--rounds 2] [--output docs/measured/rollouts.md] [--json]

A rollout is 2 prompts of 256 tokens with 16 completions each. How long each completion is was drawn once, uniformly
from 16 to 128 tokens, and holds for every engine; so all draw the same number of tokens. Engines take turns, each run
is a process of its own: a short rollout to warm up, then the timed ones. vLLM runs in an environment of its own, in
float32 as the others, its prefix cache on and emptied between rollouts; without that environment it is left out.
`vs_generate` and `vs_vllm` are our tokens a second over theirs, median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import at_least, output_file, shown, write_output
from extras import stop
from inputs import long_prompts, need_model, smollm2, without_end
from machine import machine, measured_by
from measure import run
from rollout_engines import Case

from grpo.data.template import prompt_tokens
from grpo.model.loading import load_tokenizer

HERE = Path(__file__).parent
LABELS = {"ours": "r1flow", "generate": "transformers.generate", "vllm": "vLLM"}
SHORTEST = 16
Run = dict[str, Any]


def make_case(args: argparse.Namespace, work: Path) -> Case:
    model = smollm2(args.build)
    tokenizer = load_tokenizer(str(model))
    messages = long_prompts(args.prompts * args.rollouts, args.prompt_tokens, tokenizer, work)
    prompts = [prompt_tokens(tokenizer, m, "chat") for m in messages]
    rng = random.Random(0)
    limits = [[rng.randint(SHORTEST, args.max_new_tokens) for _ in range(args.group)] for _ in prompts]
    at = range(0, len(prompts), args.prompts)
    return Case(
        model=str(without_end(model, work / "endless")),
        rollouts=[prompts[start : start + args.prompts] for start in at],
        limits=[limits[start : start + args.prompts] for start in at],
        seed=0,
    )


def run_engine(name: str, case_file: Path, args: argparse.Namespace, label: str) -> Run:
    """One run in a process of its own, with its rates."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE.parent)]
    python, environment = sys.executable, {"PYTHONPATH": os.pathsep.join(paths)}
    if name == "vllm":
        python, environment = str(args.vllm), {"PYTHONPATH": ""} | vllm_environment(args.threads)
    command = [python, str(HERE / "rollout_engines.py"), name, str(case_file)]
    found = run(command, case_file.with_name(name), environment)
    seconds, tokens = (sum(r[of] for r in found["rollouts"]) for of in ("seconds", "tokens"))
    result = found | {"tokens_per_s": tokens / seconds, "rollout_s": seconds / len(found["rollouts"])}
    rate = f"{result['tokens_per_s']:.1f} tokens/s, {result['rollout_s']:.2f} s a rollout"
    print(f"{label}: {LABELS[name]}: {rate}, {result['peak_mb']:,.0f} MB", file=sys.stderr, flush=True)
    return result


def vllm_environment(threads: int) -> dict[str, str]:
    """What makes it fastest here: it keeps a core for its front end unless it is told which ones to compute on, and
    with few cores the front end costs less in the same process."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; a rollout here needs 0.6 at most
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def summary(runs: list[Run]) -> Run:
    rates = [r["tokens_per_s"] for r in runs]
    middle = {of: statistics.median(r[of] for r in runs) for of in ("tokens_per_s", "rollout_s", "peak_mb")}
    return middle | {"tokens_per_s_range": [min(rates), max(rates)]}


def ratios(runs: dict[str, list[Run]]) -> Run:
    """Of our rate to the others', over the rounds."""
    found: Run = {}
    for name in ("generate", "vllm"):
        rates = [[r["tokens_per_s"] for r in runs.get(of, [])] for of in ("ours", name)]
        of_rounds = [ours / other for ours, other in zip(*rates, strict=False)]
        found[f"vs_{name}"] = statistics.median(of_rounds) if of_rounds else None
        found[f"vs_{name}_range"] = [min(of_rounds), max(of_rounds)] if of_rounds else None
    return found


def markdown(runs: dict[str, list[Run]], case: Case, args: argparse.Namespace) -> str:
    tokens = [sum(map(sum, limits)) for limits in case.limits]
    options = shown(sys.argv[1:], paths=("--output", "--build", "--vllm"), flags=("--json",))
    lines = [
        "# Grouped sampling",
        "",
        measured_by(f"python benchmarks/rollouts.py{options}"),
        "SmolLM2-135M, float32,",
        f"{args.prompts} prompts of {args.prompt_tokens} tokens x {args.group} completions of {SHORTEST} to "
        f"{args.max_new_tokens} tokens, the same lengths for all",
        f"({sum(tokens):,} tokens in {len(tokens)} rollouts). Medians (lowest - highest) of {args.rounds} rounds, "
        "alternating. Memory: peak of",
        "the process with its children.",
        "",
        "| engine | tokens/s | a rollout, s | peak, MB | r1flow's rate over it |",
        "|---|---|---|---|---|",
    ]
    found = ratios(runs)
    for name, of_engine in runs.items():
        of = summary(of_engine)
        low, high = of["tokens_per_s_range"]
        ratio = ""
        if found.get(f"vs_{name}"):
            ratio = "{:.2f} ({:.2f} - {:.2f})".format(found[f"vs_{name}"], *found[f"vs_{name}_range"])
        lines.append(
            f"| {LABELS[name]} | {of['tokens_per_s']:.1f} ({low:.1f} - {high:.1f}) | {of['rollout_s']:.2f} | "
            f"{of['peak_mb']:,.0f} | {ratio} |"
        )
    if "vllm" not in runs and not args.vllm.is_file():
        lines += ["", f"vLLM was left out: no Python at {args.vllm}; `make vllm` installs it."]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=at_least(1), default=4)
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--prompts", type=at_least(1), default=2, help="prompts of a rollout")
    parser.add_argument("--group", type=at_least(1), default=16, help="completions of a prompt")
    parser.add_argument("--prompt-tokens", type=at_least(1), default=256)
    parser.add_argument("--max-new-tokens", type=at_least(SHORTEST), default=128)
    parser.add_argument("--engine", action="append", choices=LABELS, help="may be repeated; all by default")
    parser.add_argument("--vllm", type=Path, default=Path("build/vllm/bin/python"), help="Python of vLLM's environment")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count())
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    names = args.engine or [name for name in LABELS if name != "vllm" or args.vllm.is_file()]
    if "vllm" in names and not args.vllm.is_file():
        stop(f"--engine vllm: no Python at {args.vllm}; `make vllm` installs it, or give --vllm")
    need_model(args.build)
    args.build.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="rollouts-", dir=args.build.resolve()) as work:
        case = make_case(args, Path(work))
        case_file = case.write(Path(work) / "case.json")
        for number in range(args.rounds):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                runs[name].append(run_engine(name, case_file, args, f"round {number + 1}"))
    text = markdown(runs, case, args)
    print(text)
    if args.output:
        write_output(args.output, text)
    if args.json:
        engines = {name: summary(of_engine) for name, of_engine in runs.items()}
        print(json.dumps(ratios(runs) | {"engines": engines, "machine": machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
