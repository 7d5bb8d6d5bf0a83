"""The journal of tries and the page that is made of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.trial import BY_RERUN, CLEAR, HEALED, WRONG

OUTCOMES = (HEALED, BY_RERUN, CLEAR, WRONG)


def read(journal: Path) -> list[dict[str, Any]]:
    """The tries of a journal: the newest record of each. A line that a kill cut off is left out."""
    newest: dict[tuple[str, int, int], dict[str, Any]] = {}
    if journal.exists():
        for line in journal.read_text().splitlines():
            try:
                record = json.loads(line)
                newest[record["kind"], record["number"], record["seed"]] = record
            except (ValueError, KeyError, TypeError):
                continue
    return [*newest.values()]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: fault / tries / how many of them it was seen to strike / outcomes."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    lines = [f"| fault | tries | struck | {' | '.join(OUTCOMES)} |", "|---|---:|---:|---:|---:|---:|---:|"]
    for kind in sorted(kinds, key=str.lower):
        lines.append(f"| {kind} | {' | '.join(_cells(kinds[kind]))} |")
    lines.append(f"| **all {len(kinds)} kinds** | {' | '.join(f'**{cell}**' for cell in _cells(records))} |")
    return "\n".join(lines)


def _cells(records: list[dict[str, Any]]) -> list[str]:
    counts = Counter(record["outcome"] for record in records)
    return [str(len(records)), struck(records), *(str(counts[outcome]) for outcome in OUTCOMES)]


def struck(records: list[dict[str, Any]]) -> str:
    """In how many tries the fault was seen to strike, and how many of an earlier suite do not say."""
    seen = Counter(record.get("struck") for record in records)
    return f"{seen[True]}, {seen[None]} unknown" if seen[None] else str(seen[True])


def wrong(records: list[dict[str, Any]]) -> str:
    """One line for each try that went wrong."""
    lines = [
        f"- {r['kind']} (try {r['number']}, {r['commit']}): {re.sub(r'/[^ ]*/homes/home', 'HOME', r['why'])}"
        for r in records
        if r["outcome"] == WRONG
    ]
    return "\n".join(lines)


def page(path: Path, records: list[dict[str, Any]], kinds: Iterable[str], command: str, machine: str) -> None:
    """Write the table into a page, between its marks `table` and `end`; `kinds` are all that there are."""
    before, _, rest = path.read_text().partition("<!-- table -->")
    after = rest.partition("<!-- end -->")[2]
    commits = ", ".join(f"{c} ({n})" for c, n in Counter(r["commit"] for r in records).most_common())
    seeds = ", ".join(sorted({str(r["seed"]) for r in records}))
    parts = [f"`{command}`, seed {seeds}; {machine}; tries by commit: {commits}.", table(records)]
    if untried := sorted(set(kinds) - {record["kind"] for record in records}, key=str.lower):
        parts.append(f"Without a try so far: {', '.join(untried)}.")
    if named := wrong(records):
        parts.append(f"What went wrong:\n\n{named}")
    path.write_text(f"{before}<!-- table -->\n" + "\n\n".join(parts) + f"\n<!-- end -->{after}")
