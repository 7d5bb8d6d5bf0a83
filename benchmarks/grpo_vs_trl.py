"""A GRPO step of TRL's own trainer against ours: same model, prompts, settings and threads, in one call.

    pip install trl; python benchmarks/grpo_vs_trl.py [--setting small] [--steps N] [--rounds 2] [--full]
        [--portable] [--output docs/measured/grpo_vs_trl.md] [--json]

Sides alternate, each run is a process of its own: two steps to warm up, then the timed ones (sampling, rewards,
reference, update, optimizer). TRL runs in two micro-batches: as many completions as memory allows, and a quarter of
that. Both sides use all instructions of the CPU; --portable restricts ours as a stage's trainer in float32 is by
default. Completions end by themselves; --full takes the end mark away on both sides. The agreement gives both losses
the same rollouts and compares loss and gradients. `throughput_ratio` is ours / TRL in completion tokens a second,
`memory_ratio` ours / TRL in peak memory of the process and its children, each the median of the rounds, against the
faster of TRL's micro-batches; of the first setting, and below it of each against both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from arguments import at_least, output_file, write_output
from extras import need
from grpo_case import Case
from grpo_vs_trl_page import markdown, parts_of
from grpo_vs_trl_settings import SETTINGS, WARM_UP, Run
from inputs import need_model, without_end
from machine import machine
from measure import run

from grpo.errors import InputError
from grpo.processes.cpu_instructions import PORTABLE

HERE = Path(__file__).parent
AGREE = 1e-4


def make_case(name: str, args: argparse.Namespace) -> Case:
    setting = SETTINGS[name]
    folder = args.work / name
    folder.mkdir(exist_ok=True)
    model = setting.model(args.build, folder)
    prompts = setting.prompts(model, folder)
    rows = len(prompts) * setting.group_size
    if args.trl_rows and rows % args.trl_rows:
        raise InputError(f"--trl-rows {args.trl_rows}: the {rows} completions of {name} are no multiple of that")
    return Case(
        folder=str(folder),
        model=str(without_end(model, folder / "endless") if args.full else model),
        prompts=prompts,
        group_size=setting.group_size,
        max_new_tokens=setting.max_new_tokens,
        kl_coef=0.001,
        micro_batch_tokens=args.micro_batch_tokens or setting.micro_batch_tokens,
        trl_rows=args.trl_rows or setting.trl_rows[0],
        warm_up=WARM_UP,
        steps=args.steps or setting.steps,
        seed=0,
    )


def run_side(side: str, case: Case, label: str, variables: Mapping[str, str] | None = None) -> Run:
    """One run in a process of its own, with its rates."""
    folder = Path(case.folder)
    settings = str(case.write(folder / f"{side}.json"))
    record = _call("grpo_step.py", side, settings, log=folder / side, variables=variables)
    assert len(record["steps"]) == case.steps, record
    seconds, tokens = (sum(step[name] for step in record["steps"]) for name in ("seconds", "tokens"))
    names = record["steps"][0]["parts"]
    result = record | {
        "step_s": seconds / case.steps,
        "tokens_per_s": tokens / seconds,
        "completion_tokens": tokens / case.steps / case.rows,
        "parts": {name: sum(step["parts"][name] for step in record["steps"]) / case.steps for name in names},
    }
    say(f"{label}: {side}: {describe(result)}")
    return result


def _call(script: str, *arguments: str, log: Path, variables: Mapping[str, str] | None = None) -> Run:
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]
    command = [sys.executable, str(HERE / script), *arguments]
    return run(command, log, {"PYTHONPATH": os.pathsep.join(paths), **(variables or {})})


def describe(result: Run) -> str:
    return (
        f"{result['step_s']:.2f} s a step ({parts_of(result)}), {result['tokens_per_s']:.1f} tokens/s, "
        f"{result['completion_tokens']:.1f} tokens a completion, {result['peak_mb']:,.0f} MB"
    )


def compare(name: str, args: argparse.Namespace) -> Run:
    """All rounds of one setting: ours, and TRL in each of its micro-batches."""
    case = make_case(name, args)
    cases = {
        rows: replace(case, trl_rows=rows) for rows in ([args.trl_rows] if args.trl_rows else SETTINGS[name].trl_rows)
    }
    trl: dict[int, list[Run]] = {rows: [] for rows in cases}
    ours: list[Run] = []
    for number in range(args.rounds):
        label = f"{name}, round {number + 1}"
        for side in (("trl", "ours"), ("ours", "trl"))[number % 2]:
            if side == "ours":
                ours.append(run_side("ours", case, label, PORTABLE if args.portable else None))
                continue
            for rows, of_rows in cases.items():
                trl[rows].append(run_side("trl", of_rows, f"{label}, micro-batches of {rows}"))
    asked = {r["prompt_tokens"] for runs in (ours, *trl.values()) for r in runs}
    if len(asked) > 1:
        raise RuntimeError(f"{name}: the sides read prompts of other lengths: {asked}")
    by_rows = {rows: ratios(runs, ours) for rows, runs in trl.items()}
    return {
        **by_rows[fastest(trl)],
        "case": {
            "steps": case.steps,
            "rows": case.rows,
            "prompt_tokens": asked.pop() / len(case.prompts),
            "max_new_tokens": case.max_new_tokens,
            "micro_batch_tokens": case.micro_batch_tokens,
        },
        "ours": summary(ours),
        "trl": {rows: summary(runs) | by_rows[rows] for rows, runs in trl.items()},
    }


def fastest(trl: Mapping[int, list[Run]]) -> int:
    """TRL's micro-batch of the highest rate, the median of the rounds. A larger one is slower where memory is."""
    return max(trl, key=lambda rows: statistics.median(run["tokens_per_s"] for run in trl[rows]))


def ratios(trl: list[Run], ours: list[Run]) -> Run:
    """Ours / TRL's, round by round: the median, and the range."""
    medians: Run = {}
    for name, of in (("throughput_ratio", "tokens_per_s"), ("memory_ratio", "peak_mb")):
        each = [b[of] / a[of] for a, b in zip(trl, ours, strict=True)]
        medians |= {name: statistics.median(each), f"{name}_range": [min(each), max(each)]}
    return medians


def summary(runs: list[Run]) -> Run:
    names = ("step_s", "tokens_per_s", "completion_tokens", "peak_mb", "high_water_mb")
    middle = {name: statistics.median(r[name] for r in runs) for name in names}
    rates = [r["tokens_per_s"] for r in runs]
    parts = {part: statistics.median(r["parts"][part] for r in runs) for part in runs[0]["parts"]}
    medians = middle | {"tokens_per_s_range": [min(rates), max(rates)], "parts": parts}
    if "update_flops_per_s" in runs[0]:
        medians["update_share"] = statistics.median(r["update_flops_per_s"] / r["peak_flops_per_s"] for r in runs)
        medians["peak_gflops_per_s"] = statistics.median(r["peak_flops_per_s"] for r in runs) / 1e9
    return medians


def agree(args: argparse.Namespace) -> Run:
    """On the rollouts of the setting `small`, in the smaller of TRL's micro-batches, with a penalty that counts: with
    0.001 a wrong one could hide below the tolerance."""
    case = make_case("small", args)
    folder = args.work / "agreement"
    case = replace(case, folder=str(folder), trl_rows=min(SETTINGS["small"].trl_rows), kl_coef=0.1)
    agreement = _call("grpo_agreement.py", str(case.write(folder / "case.json")), log=folder / "agreement")
    say(f"agreement: loss {agreement['loss_difference']:.1e}, gradients {agreement['gradient_difference']:.1e}")
    return agreement


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="may be repeated; all by default")
    parser.add_argument("--steps", type=at_least(1), help="timed steps of a run; by default the setting's")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--full", action="store_true", help="completions never end before their longest length")
    parser.add_argument("--threads", type=at_least(1), default=os.cpu_count())
    parser.add_argument("--micro-batch-tokens", type=at_least(1), help="ours; by default the setting's")
    parser.add_argument("--trl-rows", type=at_least(1), help="completions of TRL's micro-batches; tried out by default")
    parser.add_argument("--portable", action="store_true", help="ours with the instructions of a stage's trainer only")
    parser.add_argument("--agreement", choices=["yes", "no", "only"], default="yes")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    names = [] if args.agreement == "only" else args.setting or list(SETTINGS)
    need("trl")
    if args.agreement != "no" or set(names) != {"demo"}:
        need_model(args.build)
    args.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl-", dir=args.build.resolve()) as work:
        args.work = Path(work)
        results = {name: compare(name, args) for name in names}
        agreed = agree(args) if args.agreement != "no" else None
    text = markdown(results, agreed, args)
    print(text)
    if args.output:
        write_output(args.output, text)
    if args.json:
        first = {k: results[names[0]][k] for k in ("throughput_ratio", "memory_ratio")} if results else {}
        differences = {k: agreed[k] for k in ("loss_difference", "gradient_difference")} if agreed else {}
        print(json.dumps(first | differences | {"settings": results, "agreement": agreed, "machine": machine()}))
    if agreed and max(agreed["loss_difference"], agreed["gradient_difference"]) > AGREE:
        say(f"loss or gradients differ by more than {AGREE}")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        say(f"error: {error}")
        sys.exit(2)
