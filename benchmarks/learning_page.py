"""The page of the study of learning: claims over all cells, every cell, and checkpoints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from claims import Claim, Claims
from learning_cells import Cell
from machine import machine, machines

from tasks.report.tables import COLUMNS

ORDER = ("base", "dev1", "dev2", "dev3", "r1")
_REASONED = ("pass@1", "stated", "stated_stepwise", "steps_right", "stepwise", "format", "language", "mean_tokens")
REASONING = {name: COLUMNS[name] for name in _REASONED}
GENERAL = {
    "refusal": "refuses harmful",
    "over_refusal": "refuses look-alikes",
    "refused_harmless": "refuses other harmless",
    "win_rate_dev3": "wins over dev3",
    "win_rate_dev3_lc": "at equal length",
    "alignment": "alignment",
    "general_tokens": "answer tokens",
    "general_repeated": "repeated",
}
_PLAIN = {"mean_tokens": "{:.0f}", "alignment": "{:.2f}", "general_tokens": "{:.0f}"}
"""Metrics that are no shares."""
Records = Mapping[Cell, Mapping[str, Any]]


def verdicts(claims: Claims, record: Mapping[str, Any]) -> dict[Claim, tuple[float, bool]]:
    """Claim -> its number in a cell and whether it holds; empty for a run that failed."""
    if "result" not in record:
        return {}
    values = {claim: claim.value(record["result"]) for claim in claims.claims}
    return {claim: (value, claim.holds(value)) for claim, value in values.items()}


def failed(claims: Claims, records: Records) -> list[Cell]:
    """Cells whose run failed or in which a claim does not hold."""
    checked = {cell: verdicts(claims, record) for cell, record in records.items()}
    return [cell for cell, of in checked.items() if not of or not all(ok for _, ok in of.values())]


def page(claims: Claims, records: Records, planned: Sequence[Cell], command: str, recipe: str, made_with: str) -> str:
    """Markdown. `planned`: all cells that the command asks for, run or not; `made_with`: commit and the like."""
    missing = [cell for cell in planned if cell not in records]
    wrong = failed(claims, records)
    rule = claims.seeds
    lines = [
        "# Does it learn?",
        "",
        f"`{command}` on {machines(records.values()) or machine()}, {made_with}.",
        "",
        f"{len(records)} of {len(planned)} cells were run; {len(wrong)} of them failed a claim or did not end.",
        *([f"Not run yet: {_span(missing)}."] if missing else []),
        "",
        f"The settings of `{recipe}` were chosen on seeds {_listed(rule.tuned_on)}. The seeds of the report follow a",
        f"rule, written down before any of them was run: the {rule.count} smallest integers from {rule.start} on whose",
        f"SHA-256 begins with one of {rule.first_digits}, which are {_listed(rule.seeds())}. The claims are those of",
        "[claims.toml](../../benchmarks/claims.toml). pass@1 is the mean of all samples of the held-out problems, read",
        "strictly; the next columns are explained in [evaluation](../evaluation.md#format-habit-arithmetic).",
        "",
        "## Claims",
        "",
        "| claim | bound | holds in | median | range |",
        "|---|---|---|---|---|",
    ]
    checked = [of for record in records.values() if (of := verdicts(claims, record))]
    for claim in claims.claims:
        found = [of[claim] for of in checked]
        if found:
            values = [value for value, _ in found]
            middle = claim.shown(statistics.median(values))
            span = f"{claim.shown(min(values))} to {claim.shown(max(values))}"
            holds = sum(ok for _, ok in found)
            lines.append(f"| {claim.says} | {claim.bound} | {holds} of {len(found)} | {middle} | {span} |")
    lines += ["", "## Median and range of all cells", "", *summary(records)]
    lines += ["", "## Cells", "", "Load is what the benchmark itself starts beside a cell, and not what else runs."]
    lines += ["Models: whether the hashes of all checkpoints are those of the seed's first cell.", ""]
    lines += ["| seed | threads | CPU | load | minutes | models | claims that fail |", "|" + "---|" * 7]
    first: dict[int, str] = {}
    for cell, record in records.items():
        of = verdicts(claims, record)
        broken = [f"{claim.says}: {claim.shown(value)}" for claim, (value, ok) in of.items() if not ok]
        said = "; ".join(broken) if broken else "none" if of else f"the run failed: {record['error']}"
        minutes = f"{record['seconds'] / 60:.1f}"
        same = ""
        if models := _evaluate_key(record):
            same = "first" if cell.seed not in first else "identical" if first[cell.seed] == models else "others"
            first.setdefault(cell.seed, models)
        row = (cell.seed, cell.threads, cell.cpu, cell.load, minutes, same, said)
        lines.append(f"| {' | '.join(map(str, row))} |")
    for title, columns in (("Reasoning", REASONING), ("General prompts", GENERAL)):
        lines += ["", f"## {title}", "", *_checkpoints(records, columns)]
    return "\n".join([*lines, ""])


def _evaluate_key(record: Mapping[str, Any]) -> str:
    """The key of the stage that evaluates all checkpoints, which is made of their hashes; empty if the run failed."""
    stages = record["result"]["stages"] if "result" in record else ()
    return next((stage["key"] for stage in stages if stage["name"] == "evaluate"), "")


def summary(records: Records) -> list[str]:
    """A row a metric, a column a checkpoint: the median over the cells, and the range."""
    tables = [record["result"]["checkpoints"] for record in records.values() if "result" in record]
    rows = [f"| | {' | '.join(ORDER)} |", "|---" * (len(ORDER) + 1) + "|"]
    for key, title in {**REASONING, **GENERAL}.items():
        shown = []
        for name in ORDER:
            values = [table[name][key] for table in tables if key in table.get(name, {})]
            middle, low, high = (
                (_shown(key, of(values)) for of in (statistics.median, min, max)) if values else ("", "", "")
            )
            shown.append(middle if low == high else f"{middle} ({low} to {high})")
        rows.append(f"| {title} | {' | '.join(shown)} |")
    return rows


def _checkpoints(records: Records, columns: Mapping[str, str]) -> list[str]:
    rows = [f"| cell | checkpoint | {' | '.join(columns.values())} |", "|---" * (len(columns) + 2) + "|"]
    done = {cell.name: record["result"]["checkpoints"] for cell, record in records.items() if "result" in record}
    for cell, table in done.items():
        for name in ORDER:
            cells = [_shown(key, table[name][key]) if key in table.get(name, {}) else "" for key in columns]
            rows.append(f"| {cell} | {name} | {' | '.join(cells)} |")
    return rows


def _shown(key: str, value: float) -> str:
    return _PLAIN[key].format(value) if key in _PLAIN else f"{100 * value:.1f}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _span(missing: Sequence[Cell]) -> str:
    shown = ", ".join(cell.name for cell in missing[:6])
    return shown if len(missing) <= 6 else f"{shown} and {len(missing) - 6} more"
