"""The closing table for a terminal: one row per metric, one column per checkpoint, in blocks that fit the width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.evaluation.records import by_set
from tasks.report.tables import paper_rows, sizes

WIDTH = 100
_GAP = 2
_COUNTS = ("problems", "samples", "k")


def closing_lines(table: Mapping[str, Mapping[str, Any]], columns: int = WIDTH) -> Iterator[str]:
    """The lines of a closing table and of those of its test sets. No line is longer than `columns`, unless a single
    checkpoint needs more."""
    yield from grid(table, columns)
    for name, of in by_set(table).items():
        yield f"\n{name}: {sizes(of)}"
        yield from grid(of, columns)


def grid(table: Mapping[str, Mapping[str, Any]], columns: int = WIDTH, *, counts: bool = False) -> Iterator[str]:
    """One closing table. An interval is below its metric. `counts`: a line above it gives the numbers of problems and
    samples."""
    rows: list[tuple[str, list[str]]] = []
    for name in _COUNTS if counts else ():
        rows.append((name, [str(metrics.get(name, "")) for metrics in table.values()]))
    for row in paper_rows(table):
        rows.append((row["title"], [cell["text"] for cell in row["cells"]]))
        if any(cell["interval"] for cell in row["cells"]):
            rows.append(("  interval", [cell["interval"] for cell in row["cells"]]))
    label = max((len(title) for title, _ in rows), default=0)
    names = list(table)
    widths = [max(len(name), *(len(cells[at]) for _, cells in rows), 0) for at, name in enumerate(names)]
    for block in _blocks(widths, columns - label):
        if block[0]:
            yield ""
        for title, cells in [("", names), *rows]:
            yield (f"{title:<{label}}" + "".join(f"{'':{_GAP}}{cells[at]:>{widths[at]}}" for at in block)).rstrip()


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Column numbers of each block, whose columns fit side by side."""
    block: list[int] = []
    for at, _ in enumerate(widths):
        if block and sum(widths[of] + _GAP for of in [*block, at]) > room:
            yield block
            block = []
        block.append(at)
    if block:
        yield block
