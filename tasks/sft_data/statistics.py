"""Outcomes of all samples of a data set in numbers: plain dicts for the card, the terminal and the plots.

A tally has one line for each combination of part, domain, source, language and outcome. All tables are sums of its
lines, so all of them add up to the number of samples.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo.data.conversations import from_columns
from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.sft_data.mix_settings import MixSettings, matches

KEPT, DROPPED = "kept", "dropped"
STATISTICS = "statistics.json"
_SHOWN_CHARACTERS = 2000
_BINS = 20


class Cell(NamedTuple):
    """Part, domain, source and language by which samples are counted."""

    part: str
    domain: str
    source: str
    language: str


class Dropped:
    """Samples and tokens that the filters dropped, by cell and reason. For each reason, keeps the samples with the
    smallest ids, to show."""

    def __init__(self, examples: int):
        self.lines: dict[tuple[Cell, str], list[int]] = defaultdict(lambda: [0, 0])
        self._examples = examples
        self._shown: dict[str, list[dict[str, Any]]] = {}

    def add(self, table: pa.Table, part_of: Callable[[str, str], str], problems: Mapping[str, Problem]) -> None:
        sums = table.group_by(["domain", "source", "language", "reason"]).aggregate(
            [([], "count_all"), ("tokens", "sum")]
        )
        for row in sums.to_pylist():
            cell = Cell(part_of(row["source"], row["domain"]), row["domain"], row["source"], row["language"])
            line = self.lines[cell, row["reason"]]
            line[0] += row["count_all"]
            line[1] += row["tokens_sum"]
        for reason in pc.unique(table["reason"]).to_pylist() if self._examples else []:
            rows = table.take(np.flatnonzero(pc.equal(table["reason"], reason)))
            first = rows.take(pc.select_k_unstable(rows, self._examples, _BY_ID))
            rows_shown = self._shown.get(reason, [])
            for row in first.to_pylist():
                problem = problems.get(row["problem_id"])
                rows_shown.append(
                    shown_row(row, part_of(row["source"], row["domain"]), problem.text if problem else "")
                )
            rows_shown.sort(key=lambda row: (row["problem_id"], row["number"]))
            self._shown[reason] = rows_shown[: self._examples]

    def shown(self) -> dict[str, list[dict[str, Any]]]:
        return dict(sorted(self._shown.items()))


_BY_ID = [("problem_id", "ascending"), ("number", "ascending")]


class Shown:
    """Samples to show for each part and outcome of the mix: those that came first in the draw."""

    def __init__(self, outcome_of: Mapping[int, str], selected: np.ndarray):
        self.wanted = selected
        self._outcome_of = outcome_of
        self._rows: dict[int, dict[str, Any]] = {}

    @classmethod
    def choose(
        cls, candidates: np.ndarray, cells: Sequence[Cell], outcome: np.ndarray, names: Sequence[str], examples: int
    ) -> Shown:
        parts = sorted({cell.part for cell in cells})
        part = np.array([parts.index(cell.part) for cell in cells])[candidates["cell"]]
        known = np.array([names.index(name) for name in names])[outcome]  # one number per outcome name
        outcome_of: dict[int, str] = {}
        for number in np.unique(known):
            for other in range(len(parts)):
                group = np.flatnonzero((known == number) & (part == other))
                first = group[np.argsort(candidates["draw"][group], kind="stable")][:examples]
                outcome_of |= dict.fromkeys(first.tolist(), names[number])
        selected = np.zeros(len(candidates), bool)
        selected[list(outcome_of)] = True
        return cls(outcome_of, selected)

    def add(self, numbers: np.ndarray, rows: pa.Table) -> None:
        """Stores those of these candidates (rows of the data set) that were chosen to be shown."""
        chosen = np.flatnonzero(self.wanted[numbers])
        shown = map(from_columns, rows.take(chosen).to_pylist())
        for number, row in zip(numbers[chosen].tolist(), shown, strict=True):
            self._rows[number] = shown_row(row, row["part"], prompt_text(row["messages"]))

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        by_part: dict[str, list[dict[str, Any]]] = {}
        rows = sorted(self._rows.items(), key=lambda item: (item[1]["part"], item[1]["problem_id"], item[1]["number"]))
        for number, row in rows:
            by_part.setdefault(self._outcome_of[number], []).append(row)
        return by_part


def shown_row(row: Mapping[str, Any], part: str, prompt: str) -> dict[str, Any]:
    """A sample for display: its ids, and its truncated prompt and completion."""
    kept = {name: row[name] for name in ("problem_id", "number", "source", "language")}
    texts = {"prompt": prompt, "completion": row["completion"]}
    cut = {k: v if len(v) <= _SHOWN_CHARACTERS else v[:_SHOWN_CHARACTERS] + " …" for k, v in texts.items()}
    return {**kept, "part": part, **cut}


def prompt_text(messages: Sequence[Mapping[str, str]]) -> str:
    """The user's messages, one per line."""
    return "\n".join(message["content"] for message in messages if message["role"] == "user")


class Tally:
    """The lines of the tally, and every table made from them."""

    def __init__(
        self, lines: Mapping[tuple[Cell, str], Sequence[int]], held_out: Counter[Cell], tokens: dict[str, Any]
    ):
        self._lines = dict(sorted(lines.items()))
        self._held_out = held_out
        self._tokens = tokens
        self.sampled = sum(samples for samples, _ in self._lines.values())

    @classmethod
    def of(
        cls, dropped: Dropped, cells: Sequence[Cell], candidates: np.ndarray, outcome: np.ndarray, names: Sequence[str]
    ) -> Tally:
        """`outcome` of each candidate is an index into `names`; the first two are kept, for training and held out."""
        lines = {key: list(line) for key, line in dropped.lines.items()}
        held_out: Counter[Cell] = Counter()
        group = candidates["cell"].astype(np.int64) * len(names) + outcome
        samples = np.bincount(group, minlength=len(cells) * len(names))
        tokens = np.bincount(group, candidates["tokens"], minlength=len(cells) * len(names))
        for number in np.flatnonzero(samples).tolist():
            cell, name = cells[number // len(names)], names[number % len(names)]
            line = lines.setdefault((cell, name), [0, 0])
            line[0] += int(samples[number])
            line[1] += int(tokens[number])
            if number % len(names) == 1:
                held_out[cell] += int(samples[number])
        kept = candidates[outcome < 2]
        part = np.array([cell.part for cell in cells] or [""])[kept["cell"]]
        lengths = {str(name): kept["tokens"][part == name] for name in np.unique(part)}
        return cls(lines, held_out, histograms(lengths))

    def outcomes(self) -> dict[str, int]:
        """Number of samples by outcome: kept, and every reason."""
        counts: Counter[str] = Counter()
        for (_, outcome), (samples, _) in self._lines.items():
            counts[outcome] += samples
        return dict(sorted(counts.items()))

    def statistics(self, settings: MixSettings) -> dict[str, Any]:
        lines = [
            {**cell._asdict(), "outcome": outcome, "samples": samples, "tokens": tokens}
            for (cell, outcome), (samples, tokens) in self._lines.items()
        ]
        parts = self._parts(settings)
        sources = sorted({line["source"] for line in lines})
        return {
            "sampled": self.sampled,
            "kept": self.outcomes().get(KEPT, 0),
            "outcomes": self.outcomes(),
            "parts": parts,
            "lines": lines,
            "tokens": self._tokens,
            "licences": {source: settings.licence(source) for source in sources},
            "warnings": self._warnings(settings, parts, sources),
        }

    def _parts(self, settings: MixSettings) -> dict[str, dict[str, Any]]:
        sizes, parts = settings.wanted(), {}
        for name in settings.all_parts:
            of_part = {key: line[0] for key, line in self._lines.items() if key[0].part == name}
            kept = sum(samples for (_, outcome), samples in of_part.items() if outcome == KEPT)
            validation = sum(count for cell, count in self._held_out.items() if cell.part == name)
            parts[name] = {
                "wanted": sizes[name],
                "sampled": sum(of_part.values()),
                "kept": kept,
                "shortage": max(0, (sizes[name] or 0) - kept),
                "train": kept - validation,
                "validation": validation,
            }
        return parts

    def _warnings(self, settings: MixSettings, parts: Mapping[str, Any], sources: Sequence[str]) -> list[str]:
        warnings = [
            f"part {name!r} has {part['kept']} examples, {part['shortage']} fewer than the {part['wanted']} wanted; "
            "sample more of its problems, or more of each"
            for name, part in parts.items()
            if part["shortage"]
        ]
        named = [(f"part {name!r}", source) for name, part in settings.all_parts.items() for source in part.sources]
        named += [("think", source) for source in ([] if isinstance(settings.think, str) else settings.think)]
        for where, name in named:
            if not any(matches(source, [name]) for source in sources):
                warnings.append(f"{where}: no sample is from source {name!r}; the sources are {', '.join(sources)}")
        if (unasked := self.outcomes().get("no_part", 0)) > 0:
            of = sorted({cell.source for (cell, outcome) in self._lines if outcome == "no_part"})
            warnings.append(f"{unasked} good samples belong to no part; their sources: {', '.join(of)}")
        if settings.validation_share and not self._held_out:
            warnings.append(
                f"nothing is held out: no part has enough examples for validation_share {settings.validation_share}"
            )
        return warnings


def histograms(lengths: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Token counts by part, in bins of equal width: {"edges": [0, w, 2w, ...], "parts": {name: {"counts": [...],
    ...}}}.

    A length that equals an edge belongs to the bin above it. Quantiles are lengths that occur in the data.
    """
    longest = max((int(values.max()) for values in lengths.values() if len(values)), default=0)
    width = _bin_width(longest + 1)
    edges = list(range(0, longest + width + 1, width))
    parts = {}
    for name, values in sorted(lengths.items()):
        middle, most = (int(np.quantile(values, q, method="inverted_cdf")) for q in (0.5, 0.95))
        parts[name] = {
            "counts": np.bincount(values // width, minlength=len(edges) - 1).tolist(),
            "total": int(values.sum(dtype=np.int64)),
            "mean": round(float(values.mean()), 2),
            "median": middle,
            "p95": most,
            "max": int(values.max()),
        }
    return {"edges": edges, "parts": parts}


def bins(tokens: Mapping[str, Any]) -> list[tuple[int, int, list[int]]]:
    """Rows (from, below, examples of each part), without the empty bins at either end."""
    counts = list(zip(*(part["counts"] for part in tokens["parts"].values()), strict=True))
    filled = [i for i, of_parts in enumerate(counts) if any(of_parts)]
    edges = tokens["edges"]
    return [(edges[i], edges[i + 1], list(counts[i])) for i in range(filled[0], filled[-1] + 1)] if filled else []


def _bin_width(span: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... with which that number of bins covers lengths below `span`."""
    power = 10 ** max(0, math.floor(math.log10(max(1, span / _BINS))))
    return next(width for width in (power, 2 * power, 5 * power, 10 * power) if width * _BINS >= span)


def by(lines: Sequence[Mapping[str, Any]], *columns: str, what: str = "samples") -> dict[tuple[str, ...], int]:
    """Sums of the lines' samples (or tokens), grouped by columns."""
    sums: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        sums[tuple(line[column] for column in columns)] += line[what]
    return dict(sorted(sums.items()))


def funnel(lines: Sequence[Mapping[str, Any]], column: str) -> tuple[list[str], list[list[Any]]]:
    """A table of samples by outcome, with a column for each value of `column`. Reasons are in descending order, kept at
    the end.

    The first row is the number of sampled ones: the sum of all other rows.
    """
    values = sorted({line[column] for line in lines})
    cells = by(lines, "outcome", column)
    totals = by(lines, "outcome")
    order = sorted((outcome for (outcome,) in totals), key=lambda o: (o == KEPT, -totals[o,], o))
    rows = [[o, totals[o,], *(cells.get((o, v), 0) for v in values)] for o in order]
    sampled = ["sampled", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))]
    return ["", "all", *(v or "no part" for v in values)], [sampled, *rows]


def read(folder: Path) -> dict[str, Any]:
    """Reads the statistics stored next to a data set's card."""
    path = folder / STATISTICS
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no statistics of a data set ({error})") from None
