"""The command `r1 compare`: differences between runs, in configuration, stages, checkpoints and learning curves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.cli.terminal import print_row, print_text
from flows.home import home, store, tracking
from grpo.errors import InputError
from tasks.paths import expanded
from tasks.tracking.tags import FLOW_TAG, RECIPE_TAG, SEED_TAG

_WHY_SHOWN = 3
_WORDS = {"field", "stage", "checkpoint", "metric", ""}


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("compare", help="what differs between runs: fields, stages, checkpoints, curves")
    command.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the beginning of an MLflow run id, latest, or latest~N; the first counts",
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="default: compare/RUNS.png in the home folder")
    command.add_argument("--json", action="store_true", help="print all of it as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the differences between two or more runs. Returns the exit code."""
    from tasks.report.compare_plot import plot
    from tasks.tracking.recipe_run import load_run

    if len(args.runs) < 2:
        raise InputError("r1 compare: give two runs or more; `latest~1 latest` are the last two")
    reader = tracking().reader
    recipe_runs = [reader.find(reference) for reference in args.runs]
    if len({run.id for run in recipe_runs}) < len(recipe_runs):
        raise InputError(f"r1 compare: {' '.join(args.runs)} name one run twice")
    runs = [load_run(reader, store(), run) for run in recipe_runs]
    result = compare(runs)
    path = expanded(args.plot or home() / "compare" / f"{'-'.join(run.id[:8] for run in recipe_runs)}.png")
    fault: InputError | None = None
    try:
        drawn = plot(reader, runs, [run.label for run in recipe_runs], path)
        result["plot"] = str(drawn) if drawn else None
    except (OSError, ValueError) as error:
        fault = InputError(f"--plot {path}: {error}; give a .png in a folder that can be written")
        result |= {"plot": None, "plot_error": str(fault)}
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    if fault is not None:  # only now: the comparison does not need the plot
        raise fault
    return 0


def compare(runs: Sequence[Any]) -> dict[str, Any]:
    """The comparison as plain values, without the plot. `runs` are RecipeRuns. Intervals are at the confidence level of
    the first run's evaluation."""
    from flows.stages.evaluate import read_table
    from tasks.report.compare import fields, metrics, stages

    evaluations = [run.manifests.get("evaluate") for run in runs]
    there = [evaluation for evaluation in evaluations if evaluation]
    confidence = there[0].config["confidence"] if there else None
    rows: list[dict[str, Any]] = []
    if confidence is not None and len(there) == len(runs) and len({evaluation.digest for evaluation in there}) > 1:
        for evaluation in there:
            store().check(evaluation)
        rows = metrics([read_table(e) for e in there], [e.local() for e in there], confidence)
    return {
        "runs": [
            {
                "id": run.run.id,
                "name": run.run.name,
                "recipe": run.run.tags.get(RECIPE_TAG),
                "flow": run.run.tags.get(FLOW_TAG),
                "seed": run.run.tags.get(SEED_TAG),
                "status": run.run.status,
                "seconds": run.run.ended - run.run.began if run.run.ended else None,
            }
            for run in runs
        ],
        "config": fields([run.config for run in runs]),
        "stages": stages(runs),
        "metrics": rows,
        "confidence": confidence,
        "evaluations": [evaluation.key if evaluation else None for evaluation in evaluations],
        "reward_models": [_scored_by(evaluation) for evaluation in evaluations],
    }


def _scored_by(evaluation: Any) -> str | None:
    """Digest of the reward models that gave an evaluation's alignment scores: those of the last round."""
    models = evaluation.inputs.get("reward_models") if evaluation else None
    return models.digest if models else None


def show(result: dict[str, Any]) -> None:
    """Prints the comparison in readable form."""
    from flows.progress import duration
    from tasks.report.tables import PLAIN
    from tasks.store.diff import shorten

    letters = [chr(ord("A") + number) for number in range(len(result["runs"]))]
    for letter, run in zip(letters, result["runs"], strict=True):
        print_row(f"{letter}  {run['id'][:8]}  {run['recipe']}: {run['name']}  ({run['status'].lower()})")

    def table(title: str, rows: list[dict[str, Any]], nothing: str) -> None:
        print()
        print_text(title)
        for line in aligned(rows) if rows else [nothing]:
            print_row(line)

    changes = [
        {"field": row["field"], **dict(zip(letters, map(shorten, row["values"]), strict=True))}
        for row in result["config"]
    ]
    table("Configuration", changes, "no field differs")
    rows = []
    for row in result["stages"]:
        status = "shared" if row["shared"] else _differs(row, letters)
        times = [duration(s) if s is not None else "" for s in row["seconds"]]
        rows.append({"stage": row["stage"], **dict(zip(letters, times, strict=True)), "": status})
    table("Stages, and what each took when it was made", rows, "none")
    _show_metrics(result, letters, table, PLAIN)
    print()
    same = bool(result["stages"]) and all(row["shared"] for row in result["stages"])
    nothing = "all are the same" if same else "no stage that differs has any"
    print_text(f"Learning curves: {result['plot'] or ('not drawn' if result.get('plot_error') else nothing)}")


def _differs(row: dict[str, Any], letters: Sequence[str]) -> str:
    """Where a stage is missing, and why its artifacts differ: of more than two runs, those of each run."""
    missing = [letter for letter, key in zip(letters, row["keys"], strict=True) if key is None]
    said = [f"not in {', '.join(missing)}"] if missing else []
    reasons = []
    for letter, of_run in zip(letters, row["why"], strict=True):
        if of_run:
            more = f" and {len(of_run) - _WHY_SHOWN} more" if len(of_run) > _WHY_SHOWN else ""
            reasons.append((f"{letter}: " if len(letters) > 2 else "") + "; ".join(of_run[:_WHY_SHOWN]) + more)
    said += [f"differs: {' | '.join(reasons)}"] if reasons else []
    return "; ".join(said) or "differs"


def _show_metrics(result: dict[str, Any], letters: Sequence[str], table: Any, plain: set[str]) -> None:
    evaluations = result["evaluations"]
    if missing := [letter for letter, key in zip(letters, evaluations, strict=True) if key is None]:
        print()
        print_text(f"Checkpoints: no evaluation of {', '.join(missing)} in the store, so nothing is compared")
        return
    if not result["metrics"]:
        print("\nCheckpoints: the runs share one evaluation")
        return
    rows = []
    for row in result["metrics"]:
        metric = row["metric"].rpartition("/")[2]
        scale, digits = (1, 2 if metric == "alignment" else 1) if metric in plain else (100, 1)
        cells: dict[str, Any] = {"checkpoint": row["checkpoint"], "metric": row["metric"]}
        for letter, value in zip(letters, row["values"], strict=True):
            cells[letter] = "" if value is None else f"{value * scale:.{digits}f}"
        for letter, of in zip(letters[1:], row["differences"], strict=True):
            cells[f"{letter} - {letters[0]}"] = _said(of, scale, digits)
        rows.append(cells)
    level = f"{100 * result['confidence']:g}%"
    table(f"Checkpoints, shares in percent; differences with {level} bootstrap intervals", rows, "none")
    known = [of for row in result["metrics"] for of in row["differences"] if of and of["problems"]]
    if known and all(of["paired"] for of in known):
        print_text(
            "The problems are the same, so intervals are paired: of each problem's own difference. ! leaves 0 out."
        )
    elif known:
        print_text(
            "~ marks intervals over problem sets that differ: they are not paired, so wider, and part of the "
            "difference may be the problems'. ! leaves 0 out."
        )
    for name, ks in _unlike(result["metrics"], letters).items():
        of_runs = ", ".join(f"{k} in {letter}" for letter, k in ks.items())
        print_text(f"{f'{name}: ' if name else ''}k is {of_runs}: pass@k and cons@k are not comparable.")
    scored = [row for row in result["metrics"] if row["metric"] == "alignment" and any(row["differences"])]
    if scored and len(set(result["reward_models"]) - {None}) > 1:
        print_text("Each run's alignment is scored by its own reward models, and these differ.")


def _unlike(metrics: Sequence[dict[str, Any]], letters: Sequence[str]) -> dict[str, dict[str, int]]:
    """Test set, or nothing for the held-out problems -> run -> k of pass@k and cons@k, if it is not the same."""
    found: dict[str, dict[str, int]] = {}
    for row in metrics:
        for letter, k in zip(letters, row.get("k", ()), strict=False):
            if k is not None:
                found.setdefault(row["metric"].rpartition("/")[0], {})[letter] = k
    return {name: ks for name, ks in found.items() if len(set(ks.values())) > 1}


def aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    """Lines of an aligned table: text left-aligned, numbers right-aligned."""
    columns = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = [{name: name for name in columns}, *rows]
    return [
        "  ".join(f"{line[name]:{'<' if name in _WORDS else '>'}{widths[name]}}" for name in columns).rstrip()
        for line in lines
    ]


def _said(of: dict[str, Any] | None, scale: int, digits: int) -> str:
    if of is None:
        return ""
    value = f"{of['value'] * scale:+.{digits}f}"
    if of["low"] is None:
        return value
    mark = "!" if of["low"] > 0 or of["high"] < 0 else ""
    apart = "" if of["paired"] else "~"
    return f"{value} [{of['low'] * scale:+.{digits}f}, {of['high'] * scale:+.{digits}f}]{apart}{mark}"
