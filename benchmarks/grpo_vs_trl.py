"""A GRPO step of TRL's own trainer against ours: same model, prompts, settings and threads, in one call.

    pip install trl; python benchmarks/grpo_vs_trl.py [--setting small] [--steps N] [--rounds 2] [--full]
        [--output docs/measured/grpo_vs_trl.md] [--json]

Sides alternate, each run is a process of its own: two steps to warm up, then the timed ones (sampling, rewards,
reference, update, optimizer). TRL runs in two micro-batches: as many completions as memory allows, and a quarter of
that. Completions end by themselves; --full takes the end mark away on both sides. The agreement gives both losses the
same rollouts and compares loss and gradients. `throughput_ratio` is ours / TRL in completion tokens a second,
`memory_ratio` ours / TRL in peak memory of the process and its children, each the median of the rounds, against TRL's
larger micro-batch; of the first setting, and below it of each against both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_step import Case
from inputs import as_prompts, demo_model, long_prompts, questions, smollm2, sums, without_end
from machine import machine
from measure import run

from grpo.data.records import Message
from grpo.errors import InputError
from grpo.model.loading import load_tokenizer

HERE = Path(__file__).parent
AGREE = 1e-4
Run = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    model: Callable[[Path, Path], Path]  # (build folder, a folder to write in) -> the model's
    prompts: Callable[[Path, Path], list[list[Message]]]  # (model, a folder to write in)
    group_size: int
    max_new_tokens: int
    micro_batch_tokens: int
    steps: int  # timed ones of a run
    trl_rows: tuple[int, int]  # completions of TRL's micro-batches
    why: str  # these


WARM_UP = 2
"""Steps that are not timed: the optimizer's moments come into being at the end of the first, and memory takes its final
size in the second."""

SETTINGS = {
    "small": Setting(
        model=lambda build, work: smollm2(build),
        prompts=lambda model, work: as_prompts(questions(4, work)),
        group_size=8,
        max_new_tokens=64,
        micro_batch_tokens=600,
        steps=2,
        trl_rows=(32, 8),
        why="the whole step, and a quarter of it",
    ),
    "long": Setting(
        model=lambda build, work: smollm2(build),
        prompts=lambda model, work: long_prompts(2, 512, load_tokenizer(str(model)), work),
        group_size=16,
        max_new_tokens=64,
        micro_batch_tokens=2048,
        steps=1,
        trl_rows=(8, 4),
        why="the whole step, 32 x 576 tokens, needs some 50 GB there",
    ),
    "demo": Setting(
        model=lambda build, work: demo_model(work),
        prompts=lambda model, work: as_prompts(sums(16)),
        group_size=8,
        max_new_tokens=48,
        micro_batch_tokens=16384,
        steps=30,
        trl_rows=(128, 32),
        why="the whole step, and a quarter of it",
    ),
}


def make_case(name: str, given: argparse.Namespace) -> Case:
    setting = SETTINGS[name]
    folder = given.work / name
    folder.mkdir(exist_ok=True)
    model = setting.model(given.build, folder)
    prompts = setting.prompts(model, folder)
    rows = len(prompts) * setting.group_size
    if given.trl_rows and rows % given.trl_rows:
        raise InputError(f"--trl-rows {given.trl_rows}: the {rows} completions of {name} are no multiple of that")
    return Case(
        folder=str(folder),
        model=str(without_end(model, folder / "endless") if given.full else model),
        prompts=prompts,
        group_size=setting.group_size,
        max_new_tokens=setting.max_new_tokens,
        kl_coef=0.001,
        micro_batch_tokens=given.micro_batch_tokens or setting.micro_batch_tokens,
        trl_rows=given.trl_rows or setting.trl_rows[0],
        warm_up=WARM_UP,
        steps=given.steps or setting.steps,
        seed=0,
    )


def run_side(side: str, case: Case, label: str) -> Run:
    """One run in a process of its own, with its rates."""
    folder = Path(case.folder)
    found = _call("grpo_step.py", side, str(case.write(folder / f"{side}.json")), log=folder / side)
    assert len(found["steps"]) == case.steps, found
    seconds, tokens = (sum(step[name] for step in found["steps"]) for name in ("seconds", "tokens"))
    names = found["steps"][0]["parts"]
    result = found | {
        "step_s": seconds / case.steps,
        "tokens_per_s": tokens / seconds,
        "completion_tokens": tokens / case.steps / case.rows,
        "parts": {name: sum(step["parts"][name] for step in found["steps"]) / case.steps for name in names},
    }
    say(f"{label}: {side}: {describe(result)}")
    return result


def _call(script: str, *arguments: str, log: Path) -> Run:
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]
    command = [sys.executable, str(HERE / script), *arguments]
    return run(command, log, {"PYTHONPATH": os.pathsep.join(paths)})


def describe(result: Run) -> str:
    return (
        f"{result['step_s']:.2f} s a step ({parts_of(result)}), {result['tokens_per_s']:.1f} tokens/s, "
        f"{result['completion_tokens']:.1f} tokens a completion, {result['peak_mb']:,.0f} MB"
    )


def compare(name: str, given: argparse.Namespace) -> Run:
    """All rounds of one setting: ours, and TRL in each of its micro-batches."""
    case = make_case(name, given)
    cases = {
        rows: replace(case, trl_rows=rows) for rows in ([given.trl_rows] if given.trl_rows else SETTINGS[name].trl_rows)
    }
    trl: dict[int, list[Run]] = {rows: [] for rows in cases}
    ours: list[Run] = []
    for number in range(given.rounds):
        label = f"{name}, round {number + 1}"
        for side in (("trl", "ours"), ("ours", "trl"))[number % 2]:
            if side == "ours":
                ours.append(run_side("ours", case, label))
                continue
            for rows, of_rows in cases.items():
                trl[rows].append(run_side("trl", of_rows, f"{label}, micro-batches of {rows}"))
    asked = {r["prompt_tokens"] for runs in (ours, *trl.values()) for r in runs}
    if len(asked) > 1:
        raise RuntimeError(f"{name}: the sides read prompts of other lengths: {asked}")
    by_rows = {rows: ratios(runs, ours) for rows, runs in trl.items()}
    return {
        **next(iter(by_rows.values())),
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


def ratios(trl: list[Run], ours: list[Run]) -> Run:
    """Ours / TRL's, round by round: the median, and the range."""
    found: Run = {}
    for name, of in (("throughput_ratio", "tokens_per_s"), ("memory_ratio", "peak_mb")):
        each = [b[of] / a[of] for a, b in zip(trl, ours, strict=True)]
        found |= {name: statistics.median(each), f"{name}_range": [min(each), max(each)]}
    return found


def summary(runs: list[Run]) -> Run:
    names = ("step_s", "tokens_per_s", "completion_tokens", "peak_mb", "high_water_mb")
    middle = {name: statistics.median(r[name] for r in runs) for name in names}
    rates = [r["tokens_per_s"] for r in runs]
    parts = {part: statistics.median(r["parts"][part] for r in runs) for part in runs[0]["parts"]}
    found = middle | {"tokens_per_s_range": [min(rates), max(rates)], "parts": parts}
    if "update_flops_per_s" in runs[0]:
        found["update_share"] = statistics.median(r["update_flops_per_s"] / r["peak_flops_per_s"] for r in runs)
        found["peak_gflops_per_s"] = statistics.median(r["peak_flops_per_s"] for r in runs) / 1e9
    return found


def agree(given: argparse.Namespace) -> Run:
    """On the rollouts of the setting `small`, in the smaller of TRL's micro-batches, with a penalty that counts: with
    0.001 a wrong one could hide below the tolerance."""
    case = make_case("small", given)
    folder = given.work / "agreement"
    case = replace(case, folder=str(folder), trl_rows=min(SETTINGS["small"].trl_rows), kl_coef=0.1)
    found = _call("grpo_agreement.py", str(case.write(folder / "case.json")), log=folder / "agreement")
    say(f"agreement: loss {found['loss_difference']:.1e}, gradients {found['gradient_difference']:.1e}")
    return found


def markdown(found: dict[str, Run], agreed: Run | None, given: argparse.Namespace) -> str:
    lengths = "have their full length" if given.full else "end by themselves, and their own tokens count"
    lines = [
        "# A GRPO step against TRL's",
        "",
        f"`python benchmarks/grpo_vs_trl.py` on {machine()}: float32, AdamW, KL 0.001, {given.threads} threads.",
        f"Medians (lowest - highest) of {given.rounds} round{'s' * (given.rounds > 1)}, alternating; "
        f"each run has {WARM_UP} steps to warm up.",
        f"Completions {lengths}. Memory: peak of the process with its children, and of the trainer alone (VmHWM).",
        "",
    ]
    if found:
        heads = ("setting", "side", "step, s", "completion tokens/s", "tokens each", "peak, MB", "trainer, MB")
        lines += [f"| {' | '.join(heads)} | our speed / its | our memory / its |", "|---" * (len(heads) + 2) + "|"]
    for name, result in found.items():
        lines += [_row(name, f"TRL, {rows} at once", of) for rows, of in result["trl"].items()]
        lines.append(_row(name, "r1flow", result["ours"]))
    lines.append("")
    for name, result in found.items():
        lines += [*_details(name, result), ""]
    if agreed:
        lines += [
            f"Given the same {agreed['completion_tokens']} completion tokens at 135M (KL 0.1), the losses differ by "
            f"{agreed['loss_difference']:.1e} (TRL's is {agreed['loss']:.4f}),",
            f"the gradients of the {agreed['parameters'] / 1e6:.1f} M parameters by at most "
            f"{agreed['gradient_difference']:.1e} (the largest is {agreed['gradient_largest']:.1e}).",
            "",
        ]
    return "\n".join(lines)


def _row(name: str, side: str, of: Run) -> str:
    low, high = of["tokens_per_s_range"]
    cells = [name, side, f"{of['step_s']:.2f}", f"{of['tokens_per_s']:.1f} ({low:.1f} - {high:.1f})"]
    cells += [f"{of['completion_tokens']:.1f}", f"{of['peak_mb']:,.0f}", f"{of['high_water_mb']:,.0f}"]
    for ratio in ("throughput_ratio", "memory_ratio"):
        cells.append("{:.2f} ({:.2f} - {:.2f})".format(of[ratio], *of[f"{ratio}_range"]) if ratio in of else "")
    return f"| {' | '.join(cells)} |"


def _details(name: str, result: Run) -> list[str]:
    case, ours = result["case"], result["ours"]
    return [
        f"`{name}`: {case['rows']} completions of at most {case['max_new_tokens']} tokens, prompts of "
        f"{case['prompt_tokens']:.0f}; r1flow in micro-batches of {case['micro_batch_tokens']} tokens, TRL of "
        f"{' and '.join(map(str, result['trl']))} completions ({SETTINGS[name].why}); "
        f"{case['steps']} timed steps a run.",
        "Seconds of a step; what is not named apart is part of sampling: "
        + "; ".join(f"{rows} at once {parts_of(of)}" for rows, of in result["trl"].items())
        + f"; r1flow {parts_of(ours)}.",
        f"Our update (forward, backward, clip, optimizer) does {ours['update_share']:.0%} of the operations a second "
        f"of matrix products before and after the steps ({ours['peak_gflops_per_s']:.0f} GFLOP/s).",
    ]


def parts_of(result: Run) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["parts"].items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="may be repeated; all by default")
    parser.add_argument("--steps", type=int, help="timed steps of a run; by default the setting's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="completions never end before their longest length")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--micro-batch-tokens", type=int, help="ours; by default the setting's")
    parser.add_argument("--trl-rows", type=int, help="completions of TRL's micro-batches; tried out by default")
    parser.add_argument("--agreement", choices=["yes", "no", "only"], default="yes")
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)
    names = [] if given.agreement == "only" else given.setting or list(SETTINGS)
    given.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl-", dir=given.build.resolve()) as work:
        given.work = Path(work)
        found = {name: compare(name, given) for name in names}
        agreed = agree(given) if given.agreement != "no" else None
    text = markdown(found, agreed, given)
    if given.output:
        given.output.write_text(text)
    print(text)
    if given.json:
        first = {k: found[names[0]][k] for k in ("throughput_ratio", "memory_ratio")} if found else {}
        differences = {k: agreed[k] for k in ("loss_difference", "gradient_difference")} if agreed else {}
        print(json.dumps(first | differences | {"settings": found, "agreement": agreed, "machine": machine()}))
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
