"""Shows a data set of the store in the terminal: funnel, sizes, lengths, and samples with their outcomes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo.data.conversations import from_columns
from grpo.errors import InputError
from tasks.printable import printable
from tasks.sft_data.mix import TRAIN
from tasks.sft_data.statistics import DROPPED, KEPT, STATISTICS, bins, by, funnel, prompt_text, read
from tasks.store.manifest import Manifest
from tasks.store.store import Store

STAGE = "sft_data"
_BAR = 24
_LINES = 12  # lines per sample, unless only one reason is shown


def find(store: Store, reference: str) -> Manifest:
    """The data set with this digest or key (or a prefix of either), or for `sft_data` or `latest:sft_data`."""
    manifest = store.check(store.resolve(f"latest:{STAGE}" if reference == STAGE else reference))
    if manifest.stage != STAGE:
        raise InputError(f"{reference}: is an artifact of stage {manifest.stage!r}; this shows those of {STAGE!r}")
    return manifest


def look(manifest: Manifest, reason: str | None, count: int) -> dict[str, Any]:
    """Statistics of a data set, with up to `count` samples of each outcome, or of `reason` alone, under "samples".

    Raises InputError if no sample has the outcome `reason`.
    """
    folder = manifest.path
    statistics = read(folder) if (folder / STATISTICS).is_file() else _counted(_shards(folder))
    known = list(statistics["outcomes"])
    if reason is not None and reason not in known:
        raise InputError(f"--reason {reason}: no sample has it; there are {', '.join(known)}")
    outcomes = known if reason is None else [reason]
    samples = {outcome: _samples(folder, statistics, outcome, count) for outcome in outcomes} if count else {}
    head = {name: getattr(manifest, name) for name in ("stage", "digest", "key", "created", "seconds")}
    return {**head, "path": str(folder), **statistics, "samples": samples}


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("samples*.parquet")) + sorted(folder.glob("samples/**/*.parquet"))


def _counted(shards: Sequence[Path]) -> dict[str, Any]:
    """Statistics computed from the samples alone, for a data set that was written without statistics."""
    lines: Counter[tuple[str, ...]] = Counter()
    tokens: Counter[tuple[str, ...]] = Counter()
    for shard in shards:
        file = pq.ParquetFile(shard)
        columns = [c for c in ("domain", "source", "language", "reason", "tokens") if c in file.schema_arrow.names]
        for batch in file.iter_batches(columns=columns):
            rows = [{"source": "", **row} for row in batch.to_pylist()]
            for row in rows:
                key = (row["domain"], row["domain"], row["source"], row["language"], row["reason"] or KEPT)
                lines[key] += 1
                tokens[key] += row["tokens"]
    names = ("part", "domain", "source", "language", "outcome")
    examples = [
        {**dict(zip(names, key, strict=True)), "samples": lines[key], "tokens": tokens[key]} for key in sorted(lines)
    ]
    outcomes = {outcome: n for (outcome,), n in by(examples, "outcome").items()}
    return {"sampled": lines.total(), "kept": outcomes.get(KEPT, 0), "outcomes": outcomes, "lines": examples}


def _samples(folder: Path, statistics: Mapping[str, Any], outcome: str, count: int) -> list[dict[str, Any]]:
    """Samples from the data set and the shards if they contain any, or else those stored in the statistics."""
    examples = sorted((folder / TRAIN).glob("*.parquet"))
    if outcome == KEPT and examples:
        rows = [from_columns(row) for row in ds.dataset(examples).head(count, batch_size=1024).to_pylist()]
        return [{**_who(row), "prompt": prompt_text(row["messages"]), "completion": row["completion"]} for row in rows]
    stored = statistics.get("examples", {}).get(outcome, [])[:count]
    shards = _shards(folder)
    if len(stored) == count or not shards:
        return stored
    rows = _of_outcome(shards, outcome, count)
    return [{**_who(row), "prompt": None, "completion": row["completion"]} for row in rows] if rows else stored


def _of_outcome(shards: Sequence[Path], outcome: str, count: int) -> list[dict[str, Any]]:
    """The first rows with an outcome. Duplicates across shards are known only to the mix."""
    condition = (pc.field("reason") == ("" if outcome == KEPT else outcome)) & (
        pc.field("verdict") == (KEPT if outcome == KEPT else DROPPED)
    )
    return ds.dataset(list(shards)).head(count, filter=condition, batch_size=4096).to_pylist()


def _who(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("problem_id", "number", "part", "source", "language", "tokens") if name in row}


def to_json(view: Mapping[str, Any]) -> str:
    """The view as one JSON object."""
    return json.dumps(view, ensure_ascii=False)


def show(view: Mapping[str, Any], console: Console, *, whole: bool = False) -> None:
    """Prints a view. `whole` shows samples in full."""
    view = _printable(view)
    console.print(f"[bold]{view['stage']}[/] {view['digest'][:16]}, made {view['created'][:19]}, {view['path']}")
    console.print(f"{view['kept']:,} examples of {view['sampled']:,} samples")
    for warning in view.get("warnings", []):
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print(_funnel(view))
    if "parts" in view:
        console.print(_parts(view))
    console.print(_sources(view))
    if "tokens" in view:
        console.print(_histogram(view["tokens"]))
    for outcome, rows in view["samples"].items():
        for row in rows:
            console.print(_sample(outcome, row, whole))


def _printable(value: Any) -> Any:
    """The value with all texts in it printable: names of sources and problems come from data sets too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _bar(value: int, most: int) -> ProgressBar:
    return ProgressBar(total=max(1, most), completed=value, width=_BAR)


def _funnel(view: Mapping[str, Any]) -> Table:
    domains, rows = funnel(view["lines"], "domain")
    table = _table("\nWhat became of the samples", "outcome", *domains[1:], "share", "")
    for row in rows:
        share = row[1] / max(1, view["sampled"])
        numbers = (f"{value:,}" for value in row[1:])
        table.add_row(row[0], *numbers, f"{share:.1%}", _bar(row[1], view["sampled"]), style=_STYLES.get(row[0]))
    return table


_STYLES = {"sampled": "bold", KEPT: "bold green"}


def _parts(view: Mapping[str, Any]) -> Table:
    table = _table("\nParts", "part", "sampled", "wanted", "examples", "train", "validation", "short of")
    for name, part in view["parts"].items():
        size = "all" if part["wanted"] is None else f"{part['wanted']:,}"
        rest = (f"{part[column]:,}" for column in ("kept", "train", "validation", "shortage"))
        table.add_row(name, f"{part['sampled']:,}", size, *rest)
    return table


def _sources(view: Mapping[str, Any]) -> Table:
    kept = [line for line in view["lines"] if line["outcome"] == KEPT]
    examples, tokens = by(kept, "source", "language"), by(kept, "source", "language", what="tokens")
    table = _table("\nSources", "source", "language", "sampled", "examples", "tokens", "kept")
    table.columns[1].justify = "left"
    for (source, language), sampled in by(view["lines"], "source", "language").items():
        key = (source, language)
        share = f"{examples.get(key, 0) / sampled:.1%}"
        numbers = (f"{value:,}" for value in (sampled, examples.get(key, 0), tokens.get(key, 0)))
        table.add_row(Text(source or "unknown"), language, *numbers, share)
    return table


def _histogram(tokens: Mapping[str, Any]) -> Group:
    sums = [(low, high, sum(counts)) for low, high, counts in bins(tokens)]
    bars = _table("\nTokens of a response, as sampled", "tokens", "examples", "")
    for low, high, count in sums:
        bars.add_row(f"{low:,}-{high - 1:,}", f"{count:,}", _bar(count, max(count for *_, count in sums)))
    summary = _table("", "part", "mean", "median", "95% below", "longest")
    for name, part in tokens["parts"].items():
        summary.add_row(name, *(f"{part[column]:,}" for column in ("mean", "median", "p95", "max")))
    return Group(bars, summary)


def _sample(outcome: str, row: Mapping[str, Any], whole: bool) -> Panel:
    name = f"{outcome}: {row.get('part') or row.get('source', '')} {row['problem_id']} #{row.get('number', 0)}"
    completion = _cut(row["completion"], whole)
    body = [completion] if row["prompt"] is None else [Text(row["prompt"], style="cyan"), Text(), completion]
    return Panel(Group(*body), title=Text(name), title_align="left", border_style="green" if outcome == KEPT else "red")


def _cut(text: str, whole: bool) -> Text:
    lines = text.splitlines()
    if whole or (len(lines) <= _LINES and len(text) <= _LINES * 120):
        return Text(text)
    short = "\n".join(lines[:_LINES])[: _LINES * 120]
    return Text.assemble(short, (f"\n… {len(text) - len(short):,} more characters", "dim"))
