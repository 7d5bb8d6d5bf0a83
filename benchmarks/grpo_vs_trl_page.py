"""The page of benchmarks/grpo_vs_trl.py."""

from __future__ import annotations

import argparse
import sys

from arguments import shown
from grpo_vs_trl_settings import SETTINGS, WARM_UP, Run
from machine import measured_by


def markdown(results: dict[str, Run], agreed: Run | None, args: argparse.Namespace) -> str:
    lengths = "have their full length" if args.full else "end by themselves, and their own tokens count"
    options = shown(sys.argv[1:], paths=("--output", "--build"), flags=("--json",))
    lines = [
        "# A GRPO step against TRL's",
        "",
        measured_by(f"python benchmarks/grpo_vs_trl.py{options}"),
        f"float32, AdamW, KL 0.001, {args.threads} threads.",
        f"Medians (lowest - highest) of {args.rounds} round{'s' * (args.rounds > 1)}, alternating; "
        f"each run has {WARM_UP} steps to warm up.",
        f"Completions {lengths}. Memory: peak of the process with its children, and of the trainer alone (VmHWM).",
        *(["Ours is restricted to AVX2, as a stage's trainer in float32 is by default; TRL is not."] * args.portable),
        "",
    ]
    if results:
        heads = ("setting", "side", "step, s", "completion tokens/s", "tokens each", "peak, MB", "trainer, MB")
        lines += [f"| {' | '.join(heads)} | our speed / its | our memory / its |", "|---" * (len(heads) + 2) + "|"]
    for name, result in results.items():
        lines += [_row(name, f"TRL, {rows} at once", of) for rows, of in result["trl"].items()]
        lines.append(_row(name, "r1flow", result["ours"]))
    lines.append("")
    for name, result in results.items():
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
