"""The page and the picture of benchmarks/real_learning.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import Claim, Claims

Record = Mapping[str, Any]
CURVES = {
    "reward_accuracy": "accuracy",
    "reward_format": "format",
    "zero_variance_share": "groups without variance",
    "sampled_entropy": "entropy, nats a token",
    "kl_completion": "KL to the reference, nats a completion",
    "completion_tokens": "tokens of a completion",
}
"""Metrics of a training step that the page draws: name in MLflow -> title of the panel."""
NAMES = ("base", "dev1", "dev2", "dev3", "r1")
OTHER = "other"
"""Test set of the recipe whose family no stage trains on."""
GOAL_MINUTES = 60
"""Of work, for a seed."""
TRIED = "## What was tried"
_WINDOW = 5


def tried(path: Path | None) -> str:
    """The part of an existing page that people write, with its heading; the empty part where there is none."""
    text = path.read_text() if path and path.is_file() else ""
    _, heading, rest = text.partition(f"\n{TRIED}\n")
    return f"{TRIED}\n{rest}".rstrip() if heading else f"{TRIED}\n\nNothing is written here yet."


def page(claims: Claims, records: Sequence[Record], planned: Sequence[int], kept: str) -> str:
    """Markdown. `planned`: all seeds of the study. `kept`: what people wrote, from the heading TRIED on."""
    done = [record["seed"] for record in records]
    missing = [seed for seed in planned if seed not in done]
    rule = claims.seeds
    tuned = f"seed{'s' * (len(rule.tuned_on) > 1)} {', '.join(map(str, rule.tuned_on))}"
    lines = [
        "# A real model",
        "",
        "SmolLM2-135M-Instruct, from 4-bit weights, through the whole recipe [`real`](../../flows/recipes/real.toml):",
        "cold start from a few worked solutions, GRPO, rejection sampling, SFT from the base model, reward models",
        "and alignment. `make real` runs it on every seed, goes on where it was stopped, and writes this page.",
        "",
        f"Settings were chosen on {tuned}. The seeds of the page follow a rule that",
        f"was written down first: the {rule.count} smallest integers from {rule.start} on whose SHA-256 begins with",
        f"one of {rule.first_digits}. Problems are held out by the hash of what they ask. Intervals: 95%, bootstrap",
        "over problems. The base model is asked with two solved examples before the problem, the others without.",
        *(["", f"Not run yet: seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}."] if missing else []),
        "",
        "| seed | commit | minutes of work | on |",
        "|---|---|---|---|",
        *(_run(record) for record in records),
        "",
        "## Claims",
        "",
        f"| claim | bound | {' | '.join(f'seed {seed}' for seed in done)} |",
        "|---" * (len(records) + 2) + "|",
        *(_claim(claim, records) for claim in claims.claims),
        "",
        *gaps(records),
    ]
    k = next(iter(records[0]["result"]["checkpoints"].values()))["k"]
    families = [*next(iter(records[0]["families"].values()))]
    for record in records:
        table = record["result"]["checkpoints"]
        shown = [name for name in NAMES if name in table]
        lines += ["", f"## Seed {record['seed']}", ""]
        lines += [
            f"| checkpoint | pass@1 | pass@{k} | never trained on: pass@1 | pass@{k} | format | tokens |",
            "|---" * 7 + "|",
        ]
        for name in shown:
            of = table[name]
            cells = [_interval(of, "pass@1"), _interval(of, "pass@k")]
            cells += [_interval(of, f"{OTHER}/pass@1"), _interval(of, f"{OTHER}/pass@k")]
            lines.append(f"| {name} | {' | '.join(cells)} | {100 * of['format']:.1f} | {of['mean_tokens']:.0f} |")
        lines += ["", f"| pass@1 | {' | '.join(families)} |", "|---" * (len(families) + 1) + "|"]
        for name in shown:
            cells = [_interval(record["families"][name][family], "pass@1") for family in families]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += ["", *_general(table, shown, record["reward_models"])]
    lines += ["", "## Curves", "", f"Means of {_WINDOW} steps. Left: GRPO from Dev1 to Dev2. Right: alignment."]
    lines += [_drawn(records), ""]
    lines += ["![Curves of training](images/real.png)", "", kept, ""]
    return "\n".join(lines)


def gaps(records: Sequence[Record]) -> list[str]:
    """Where the seeds fall short of the goals although the claims hold."""
    k = next(iter(records[0]["result"]["checkpoints"].values()))["k"]
    rows, falls = [], 0
    for record in records:
        table = record["result"]["checkpoints"]
        cells = []
        for metric in (f"{OTHER}/pass@1", f"{OTHER}/pass@k"):
            change = table["r1"][metric] - table["dev1"][metric]
            falls += change < 0
            cells += [_interval(table["dev1"], metric), _interval(table["r1"], metric), f"{100 * change:+.1f}"]
        rows.append(f"| {record['seed']} | {' | '.join(cells)} |")
    how = "It falls on each seed" if falls == 2 * len(records) else f"It falls in {falls} of {2 * len(records)} cases"
    minutes = [sum(record["seconds"].values()) / 60 for record in records]
    took = ", ".join(
        f"{of:.0f} on seed {record['seed']}" for of, record in zip(minutes, records, strict=True) if of > GOAL_MINUTES
    )
    lines = [
        "## Where it falls short",
        "",
        "**The family never trained on.** The goal is that it does not end below its start. The last claim above",
        "starts from the base model, and both claims about this family use the upper end of an interval, which is",
        f"lenient: the cold start teaches Dev1 the form in which all families are answered. {how} from there to R1,",
        "in points:",
        "",
        f"| seed | Dev1, pass@1 | R1 | change | Dev1, pass@{k} | R1 | change |",
        "|---" * 7 + "|",
        *rows,
    ]
    if took:
        lines += ["", f"**Time.** The goal is about {GOAL_MINUTES} minutes of work a seed. Above it: {took}."]
    return lines


def has_curves(record: Record) -> bool:
    """Whether the record has a step of any curve. MLflow's of a run may be lost."""
    return any(curve for of_stage in record["curves"].values() for curve in of_stage.values())


def _drawn(records: Sequence[Record]) -> str:
    """Which seeds the picture has."""
    with_curves, without = (
        [record["seed"] for record in records if has_curves(record) == has] for has in (True, False)
    )
    missing = f" The record of {_seeds(without)} has no curves." if without else ""
    return (f"The picture has {_seeds(with_curves)}." if with_curves else "The picture is an older one.") + missing


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _general(table: Mapping[str, Any], shown: Sequence[str], reward_models: Mapping[str, float | None]) -> list[str]:
    """Refusals and win rates of each checkpoint on general prompts, and what alignment was rewarded by."""
    shares = ("refusal", "over_refusal", "refused_harmless", "win_rate_dev3", "win_rate_dev3_lc")
    names = ("helpful_held_out_accuracy", "safe_held_out_safe_right", "safe_held_out_unsafe_right")
    # Without the metric no held-out reply was of that kind.
    values = [reward_models.get(name) for name in names]
    pairs, safe, unsafe = ("-" if value is None else f"{100 * value:.0f}%" for value in values)
    return [
        "| general prompts | refuses harmful | only looks harmful | harmless | wins over dev3 | at equal length |",
        "|---" * 6 + "|",
        *(f"| {name} | {' | '.join(f'{100 * table[name][share]:.1f}' for share in shares)} |" for name in shown),
        "",
        f"Held-out replies: the helpful model is right on {pairs} of pairs, the safety",
        f"model on {safe} of safe and {unsafe} of unsafe ones.",
    ]


def _run(record: Record) -> str:
    minutes = sum(record["seconds"].values()) / 60
    return f"| {record['seed']} | {record['commit']} | {minutes:.0f} | {record['machine']} |"


def _claim(claim: Claim, records: Sequence[Record]) -> str:
    values = [claim.value(record["result"]) for record in records]
    shown = [claim.shown(value) + ("" if claim.holds(value) else ", fails") for value in values]
    return f"| {claim.says} | {claim.bound} | {' | '.join(shown)} |"


def _interval(of: Mapping[str, Any], metric: str) -> str:
    low, high = of[f"{metric}_ci95"]
    return f"{100 * of[metric]:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the up to four before it."""
    windows = [values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def draw(records: Sequence[Record], path: Path) -> None:
    """A panel for each metric and RL stage, with a line for each seed whose record has curves. Without any, a picture
    that is there stays."""
    records = list(filter(has_curves, records))
    if not records:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = ("reasoning_rl", "alignment_rl")
    figure, panels = pyplot.subplots(len(CURVES), len(stages), figsize=(9, 2.1 * len(CURVES)), squeeze=False)
    for row, (metric, title) in zip(panels, CURVES.items(), strict=True):
        for panel, stage in zip(row, stages, strict=True):
            for record in records:
                curve = record["curves"].get(stage, {}).get(metric, {})
                steps = sorted(curve, key=int)
                values = smoothed([curve[step] for step in steps])
                panel.plot([int(step) for step in steps], values, label=f"seed {record['seed']}")
            if not any(len(line.get_xdata()) for line in panel.lines):
                panel.set_axis_off()  # the stage does not reward this
                continue
            panel.set_title(title if stage == stages[0] else f"{title}, alignment", fontsize=9)
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
