"""Tables of checkpoints for a report: the closing table, and completions side by side."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.data.records import Problem, Sample, read_rows
from tasks.evaluation.records import INTERVAL, by_set

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "pass@1": "pass@1",
    "pass@1_ci95": "pass@1 interval",
    "pass@k": "pass@k",
    "pass@k_ci95": "pass@k interval",
    "cons@k": "cons@k",
    "cons@k_ci95": "cons@k interval",
    "stated": "any stated result",
    "stated_stepwise": "of worked ones",
    "steps_right": "steps right",
    "stepwise": "worked out",
    "format": "format",
    "language": "language",
    "mean_tokens": "tokens",
    "cut_off": "cut off",
    "alignment": "alignment",
    "alignment_ci95": "alignment interval",
    "win_rate_dev3": "win rate over dev3",
    "win_rate_dev3_lc": "win rate over dev3, equal length",
    "refusal": "refuses harmful",
    "over_refusal": "look-alikes",
    "refused_harmless": "harmless",
    "instructions": "instructions",
    "win_rate_dev1": "win rate over dev1",
    "win_rate_dev1_lc": "win rate over dev1, equal length",
}
PLAIN = {"mean_tokens", "alignment", "alignment_ci95"}
"""Metrics shown as plain numbers. All others are shares and shown in percent."""
_NEITHER, _LOWER = {"mean_tokens"}, {"cut_off", "over_refusal", "refused_harmless"}
_TITLES = {
    "stated": "any stated result right",
    "stated_stepwise": "stated result right, if worked out",
    "steps_right": "steps right",
    "stepwise": "worked out step by step",
    "format": "format kept",
    "language": "one language",
    "mean_tokens": "tokens a completion",
    "alignment": "alignment reward",
    "over_refusal": "refuses look-alikes",
    "refused_harmless": "refuses harmless",
    "instructions": "instructions followed",
}
"""Longer titles, for tables with one row per metric."""
_TEXT_LENGTH, _ALL_TEXT = 4000, 1_500_000


def closing_frame(table: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row per checkpoint; shares in percent, as in papers."""
    import pandas as pd  # not for `r1 plan`, which loads the modules of all stages

    rows = {}
    for name, metrics in table.items():
        rows[name] = {title: _cell(key, metrics[key]) for key, title in COLUMNS.items() if key in metrics}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("checkpoint")


def closing_rows(table: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `closing_frame` as plain values."""
    records = closing_frame(table).reset_index().to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in records]


def _cell(key: str, value: Any) -> str:
    percent = 1 if key in PLAIN else 100
    if isinstance(value, list):
        return f"{value[0] * percent:.{2 - (percent > 1)}f}-{value[1] * percent:.{2 - (percent > 1)}f}"
    return f"{value * percent:.{2 if key == 'alignment' else 1}f}"


def titled_frames(table: Mapping[str, Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """Title -> frame: the closing table, and one per test set, whose title gives the numbers of problems and
    samples."""
    frames = {"Checkpoints": closing_frame(table)}
    return frames | {f"{name}: {sizes(of)}": closing_frame(of) for name, of in by_set(table).items()}


def sizes(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The numbers of problems and samples behind a closing table; "" if unknown."""
    first = next(iter(table.values()), {})
    if "problems" not in first:
        return ""
    each = first["samples"] // max(1, first["problems"])
    k = f", k = {first['k']}" if "k" in first else ""  # an evaluation by an earlier version has no k
    return f"{first['problems']:,} problems, {each} sample{'s' if each > 1 else ''} each{k}"


def markdown(table: Mapping[str, Mapping[str, Any]]) -> str:
    """The closing table and those of test sets, for Prefect's pages."""
    return "\n".join(f"# {title}\n\n{_grid(frame)}\n" for title, frame in titled_frames(table).items())


def _grid(frame: pd.DataFrame) -> str:
    import pandas as pd

    table = frame.reset_index()
    head = "| " + " | ".join(map(str, table.columns)) + " |"
    rule = "|" + "---|" * len(table.columns)
    body = [
        "| " + " | ".join("" if pd.isna(v) else str(v) for v in row) + " |" for row in table.itertuples(index=False)
    ]
    return "\n".join([head, rule, *body])


def set_sections(table: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each test set: its name, its size, and its rows in the paper's form."""
    return [
        {"name": name, "sizes": sizes(of), "checkpoints": list(of), "rows": paper_rows(of)}
        for name, of in by_set(table).items()
    ]


def paper_rows(table: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The closing table in the paper's form: one row per metric with its unit, one cell per checkpoint, with the best
    cells marked."""
    rows = []
    for key in COLUMNS:
        if key.endswith(INTERVAL) or not any(key in metrics for metrics in table.values()):
            continue
        values = [metrics.get(key) for metrics in table.values()]
        known = [value for value in values if value is not None]
        best = None if key in _NEITHER or len(set(known)) < 2 else min(known) if key in _LOWER else max(known)
        cells = [
            {
                "text": "" if value is None else _cell(key, value),
                "interval": _between([_cell(key, bound) for bound in metrics.get(key + INTERVAL, ())]),
                "best": value is not None and value == best,
            }
            for value, metrics in zip(values, table.values(), strict=True)
        ]
        unit = "" if key in PLAIN else "%"
        rows.append({"title": _TITLES.get(key, COLUMNS[key]), "unit": unit, "cells": cells})
    return rows


def _between(bounds: list[str]) -> str:
    return (" to " if any(bound.startswith("-") for bound in bounds) else "–").join(bounds)


def completions(problems: Iterable[Problem], samples: Mapping[str, Path], shown: int) -> list[dict[str, Any]]:
    """The first `shown` problems of each domain, with every checkpoint's first answer.

    `samples`: checkpoint -> folder of its samples. Long texts are truncated, and so is the list if it would get very
    long.
    """
    shown_problems: dict[str, Problem] = {}
    for problem in problems:
        if sum(p.domain == problem.domain for p in shown_problems.values()) < shown:
            shown_problems[problem.id] = problem
    answers = {name: _first(folder, shown_problems) for name, folder in samples.items()}
    sections: list[dict[str, Any]] = []
    written = 0
    for problem in sorted(shown_problems.values(), key=lambda p: p.domain != "reasoning"):
        answers_shown = [_answer(name, of[problem.id]) for name, of in answers.items() if problem.id in of]
        written += sum(len(answer["text"]) for answer in answers_shown)
        if written > _ALL_TEXT:
            break
        if answers_shown:
            gold = problem.answer if problem.domain == "reasoning" else ""
            asks = {"domain": problem.domain, "prompt": _cut(problem.text), "gold": _cut(gold)}
            sections.append(
                {**asks, "number": 1 + sum(f["domain"] == problem.domain for f in sections), "answers": answers_shown}
            )
    return sections


def _first(folder: Path, problems: Mapping[str, Problem]) -> dict[str, Sample]:
    """Problem -> its first sample. Reads no more than necessary."""
    samples = (s for s in read_rows(folder, Sample) if s.problem_id in problems and s.number == 0)
    return {sample.problem_id: sample for sample in itertools.islice(samples, len(problems))}


def _answer(checkpoint: str, sample: Sample) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "text": _cut(sample.completion),
        "tokens": sample.tokens,
        "cut_off": sample.finish_reason == "length",
        "rewards": {name: round(value, 3) for name, value in sample.rewards.items()},
    }


def _cut(text: str) -> str:
    text = text.strip()
    more = len(text) - _TEXT_LENGTH
    return text if more <= 0 else f"{text[:_TEXT_LENGTH]} … {more:,} more characters"


def read_content(path: Path) -> dict[str, Any]:
    """The content written by the stage `report`: {"table": ..., "completions": ...}."""
    return json.loads(path.read_text(encoding="utf-8"))
