"""The journal of fuzz targets, their groups, and the page that is made of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

GROUPS: dict[str, tuple[str, ...]] = {
    "recipes": ("test_damaged_recipes", "test_recipes_of_any_text"),
    "`--set`": ("test_any_value_in_any_field", "test_overrides"),
    "problem files": ("test_problem_files", "test_files_of_other_kinds"),
    "pair files": ("test_pair_files",),
    "completions into rewards": (
        *("test_rewards", "test_consistency", "test_step_rewards"),
        *("test_answers_in_the_reasoning_alone", "test_completions_taken_apart"),
    ),
    "answers into verifiers": ("test_verifiers",),
    "answers into reasoning-gym's scorers": ("test_scorers_of_reasoning_gym",),
    "responses into constraints": ("test_constraints",),
    "judge replies": (
        *("test_replies", "test_a_reply_that_is_the_object_alone_is_always_read"),
        "test_judged_texts_keep_neither_tags_nor_markers",
    ),
    "manifests": ("test_manifests",),
    "metrics": ("test_metrics",),
    "journals": ("test_journals",),
}
"""What is fed with hostile inputs -> its test functions."""


def name_of(target: str) -> str:
    """A node id without its file."""
    return target.partition("::")[2]


def group_of(target: str) -> str:
    """The group of a node id."""
    function = name_of(target).partition("[")[0]
    return next(group for group, functions in GROUPS.items() if function in functions)


def record(nodeid: str, seconds: float, inputs: int, failure: str, commit: str) -> dict[str, Any]:
    """One line of the journal."""
    took = round(seconds, 1)
    return {"target": name_of(nodeid), "seconds": took, "inputs": inputs, "failure": failure, "commit": commit}


def read(journal: Path) -> list[dict[str, Any]]:
    """The newest record of every target. A line that a kill cut off is left out."""
    newest: dict[str, dict[str, Any]] = {}
    if journal.exists():
        for line in journal.read_text().splitlines():
            try:
                entry = json.loads(line)
                newest[entry["target"]] = entry
            except (ValueError, KeyError, TypeError):
                continue
    return [*newest.values()]


def page(path: Path, records: list[dict[str, Any]], command: str, machine: str) -> None:
    """A table of the groups, one of the targets, and what failed."""
    commits = ", ".join(f"{commit} ({n})" for commit, n in Counter(r["commit"] for r in records).most_common())
    failed = [f"- `{r['target']}`: {r['failure']}" for r in records if r["failure"]]
    parts = [
        "# Hostile inputs",
        f"`{command}`; {machine}; targets by commit: {commits}.\n"
        "[`tests/fuzz`](../../tests/fuzz) says what each target checks: a value in its range or an error of one line,\n"
        "and no other exception. Inputs are drawn by hypothesis, new ones each time. The targets of a group share its\n"
        "time.",
        "\n".join(["| fed with hostile inputs | targets | seconds | inputs | failed |", *_groups(records)]),
        "What failed:\n\n" + "\n".join(failed) if failed else "No target failed.",
        "\n".join(["| target | seconds | inputs | |", "|---|---:|---:|---|", *map(_row, _sorted(records))]),
    ]
    path.write_text("\n\n".join(parts) + "\n")


def _sorted(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda r: ([*GROUPS].index(group_of(f"::{r['target']}")), r["target"]))


def _groups(records: list[dict[str, Any]]) -> list[str]:
    lines = ["|---|---:|---:|---:|---:|"]
    for group in GROUPS:
        of = [r for r in records if group_of(f"::{r['target']}") == group]
        lines.append(_counts(group, of))
    return [*lines, _counts("**all**", records)]


def _counts(name: str, records: list[dict[str, Any]]) -> str:
    seconds, inputs = sum(r["seconds"] for r in records), sum(r["inputs"] for r in records)
    return f"| {name} | {len(records)} | {seconds:,.0f} | {inputs:,} | {sum(bool(r['failure']) for r in records)} |"


def _row(record: dict[str, Any]) -> str:
    target = record["target"].replace("|", "\\|").replace("\\\\", "\\")
    return f"| `{target}` | {record['seconds']:,.0f} | {record['inputs']:,} | {'failed' if record['failure'] else ''} |"
