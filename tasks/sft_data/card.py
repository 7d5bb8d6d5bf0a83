"""The data card: README.md of a data set, with the header that tells `datasets.load_dataset(folder)` about its splits.

Everything in it is also in statistics.json in the same folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.sft_data.statistics import KEPT, STATISTICS, bins, by, funnel

CARD = "README.md"
_SPLITS = {"train": "examples/train/*.parquet", "validation": "examples/validation/*.parquet"}
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}
_SHOWN_CHARACTERS = 600
PLACE = "path/to/this/folder"
"""Placeholder in the card for the location of the data set, until it is exported."""


def write_card(folder: Path, statistics: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Writes README.md and statistics.json into `folder`, which already holds the examples from
    `tasks.sft_data.mix.mix`.

    `about` is what the mix cannot know, as plain values, all optional: "title", "description", "command" (which makes
    the data again), "settings" (of the whole stage), "inputs" (name -> digest), "judge" (its kind and calibration
    results), "judge_prompts" (name -> digest). Any other entries are listed in the card.
    """
    (folder / STATISTICS).write_text(dumps({**statistics, "about": dict(about)}), encoding="utf-8")
    (folder / CARD).write_text(card(statistics, about), encoding="utf-8")


def dumps(value: Any) -> str:
    """JSON in the form used in the data card. Raises ValueError for NaN."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def card(statistics: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The card as text: header, summary, tables, examples, and how to reproduce it."""
    parts = [
        _header(statistics, about),
        f"# {about.get('title', 'Rejection-sampled data')}",
        about.get("description", ""),
        _use(statistics),
        *_section("Size", _size(statistics)),
        *_section("Sources", _sources(statistics)),
        *_section("Length", _lengths(statistics)),
        *_section("What was dropped, and why", _funnels(statistics)),
        *_section("Warnings", "\n".join(f"- {warning}" for warning in statistics["warnings"])),
        *_section("Judge", _judge(about)),
        *_section("Examples", _examples(statistics)),
        *_section("Making it again", _again(statistics, about)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _splits(statistics: Mapping[str, Any]) -> list[str]:
    return [name for name in _SPLITS if any(part[name] for part in statistics["parts"].values())]


def _header(statistics: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """The YAML header. Each value is written as JSON, which is valid YAML."""
    lines = [line for line in statistics["lines"] if line["outcome"] == KEPT]
    licences = {statistics["licences"][source] for (source,) in by(lines, "source")}
    one = next(iter(licences)).lower() if len(licences) == 1 else "other"
    files = [{"split": name, "path": _SPLITS[name]} for name in _splits(statistics)]
    fields = {
        "pretty_name": about.get("title", "Rejection-sampled data"),
        "language": sorted({language.partition("-")[0] for (language,) in by(lines, "language")}),
        "license": one if re.fullmatch(r"[a-z0-9.-]+", one) else "other",
        "task_categories": ["text-generation"],
        "tags": ["reasoning", "rejection-sampling", "synthetic"],
        "size_categories": [next((name for size, name in _SIZES.items() if statistics["kept"] < size), "n>10M")],
        "configs": [{"config_name": "default", "data_files": files}],
    }
    return "\n".join(["---", *(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in fields.items()), "---"])


_USE = """\
{kept:,} examples from {sampled:,} samples. `prompt` and `completion` are conversations, as TRL reads them; the
completion is what is to be learnt. `tokens` is the length of the response as it was sampled, with its chain of thought,
also where `think` is false and the completion has none.

```python
import datasets

data = datasets.load_dataset("{place}")  # {splits}
```"""


def _use(statistics: Mapping[str, Any]) -> str:
    splits = ", ".join(_splits(statistics))
    return _USE.format(place=PLACE, kept=statistics["kept"], sampled=statistics["sampled"], splits=splits)


def _size(statistics: Mapping[str, Any]) -> str:
    parts = statistics["parts"]
    lines = [line for line in statistics["lines"] if line["outcome"] == KEPT]
    tokens = by(lines, "part", what="tokens")
    rows = [
        [name, *(part[c] for c in ("kept", "shortage", "train", "validation")), tokens.get((name,), 0), part["wanted"]]
        for name, part in parts.items()
    ]
    sums = [sum(column) for column in zip(*(row[1:-1] for row in rows), strict=True)]
    all_wanted = None if any(part["wanted"] is None for part in parts.values()) else sum(row[-1] for row in rows)
    head = ["part", "examples", "short of", "train", "validation", "tokens", "wanted"]
    by_part = table(head, [[*row[:-1], _size_wanted(row[-1])] for row in [*rows, ["all", *sums, all_wanted]]])
    rest = [table([column, "examples", "tokens"], _with_tokens(lines, column)) for column in ("domain", "language")]
    return "\n\n".join([by_part, *rest])


def _size_wanted(size: int | None) -> int | str:
    return "all there is" if size is None else size


def _with_tokens(lines: Sequence[Mapping[str, Any]], column: str) -> list[list[Any]]:
    tokens = by(lines, column, what="tokens")
    return [[key[0], count, tokens[key]] for key, count in by(lines, column).items()]


def _sources(statistics: Mapping[str, Any]) -> str:
    kept = by([line for line in statistics["lines"] if line["outcome"] == KEPT], "source")
    rows = [
        [source, sampled, kept.get((source,), 0), statistics["licences"][source]]
        for (source,), sampled in by(statistics["lines"], "source").items()
    ]
    return table(["source", "sampled", "examples", "licence"], rows)


def _lengths(statistics: Mapping[str, Any]) -> str:
    parts = statistics["tokens"]["parts"]
    summary = [[name, p["mean"], p["median"], p["p95"], p["max"], p["total"]] for name, p in parts.items()]
    rows = [[f"{low}-{high - 1}", *counts, sum(counts)] for low, high, counts in bins(statistics["tokens"])]
    return "\n\n".join(
        [
            "Tokens of the responses as they were sampled.",
            table(["part", "mean", "median", "95% below", "longest", "in all"], summary),
            table(["tokens", *parts, "all"], rows),
        ]
    )


def _funnels(statistics: Mapping[str, Any]) -> str:
    """Funnels by part, domain and source. In each, the rows add up to "sampled"."""
    kinds = {"not_drawn": "was good but not drawn by the mix", "no_part": "belongs to no part of it"}
    notes = [f"`{name}` {text}" for name, text in kinds.items() if name in statistics["outcomes"]]
    tables = [table(*funnel(statistics["lines"], column)) for column in ("part", "domain")]
    head, rows = funnel(statistics["lines"], "source")
    tables.append(table(["source", *(row[0] for row in rows)], zip(head[1:], *(row[1:] for row in rows), strict=True)))
    note = "Every sample has one outcome. " + ("; ".join(notes) + "." if notes else "")
    return "\n\n".join([note.strip(), *tables])


def _judge(about: Mapping[str, Any]) -> str:
    judge, prompts = about.get("judge") or {}, about.get("judge_prompts") or {}
    tables = [table(["", ""], [[k, _plain(v)] for k, v in judge.items()])] if judge else []
    if prompts:
        tables.append(table(["prompt", "digest"], [[name, digest] for name, digest in prompts.items()]))
    return "\n\n".join(tables)


def _examples(statistics: Mapping[str, Any]) -> str:
    shown = []
    for row in statistics["examples"].get(KEPT, []):
        title = f"### {row['part']}: {_cell(row['source'])}, {row['problem_id']}, sample {row['number']}"
        shown.append("\n\n".join([title, fenced(row["prompt"]), fenced(row["completion"])]))
    return "\n\n".join(shown)


_TOLD = {"title", "description", "command", "settings", "judge", "judge_prompts"}


def _again(statistics: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    rows = [["seed", statistics["seed"]]]
    for name, made_by in (("policy", statistics["policies"]), ("engine", statistics["engines"])):
        rows += [[name, f"{digest or 'unknown'} ({count:,} examples)"] for digest, count in made_by.items()]
    for key, value in about.items():
        if key not in _TOLD:
            nested = value.items() if isinstance(value, Mapping) else [("", value)]
            rows += [[f"{key}: {name}" if name else key, _plain(v)] for name, v in nested]
    texts = [table(["", ""], rows)]
    if about.get("command"):
        texts.insert(0, fenced(about["command"], "bash"))
    if about.get("settings"):
        texts.append(fenced(dumps(about["settings"]).strip(), "json"))
    return "\n\n".join(texts)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table. Numbers have thousands separators; numeric columns are right-aligned."""
    rows = [list(row) for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(head))]
    rule = "|".join("---:" if right else "---" for right in numeric)
    lines = ["| " + " | ".join(_cell(value) for value in row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(str(value).replace("|", "\\|").split())


def _plain(value: Any) -> str | int | float:
    if isinstance(value, (str, int, float)):
        return value
    return json.dumps(value, ensure_ascii=False)


def fenced(text: str, language: str = "text", longest: int = _SHOWN_CHARACTERS) -> str:
    """A code block that backticks in the text cannot close. Long text is truncated, code is not."""
    if language == "text" and len(text) > longest:
        text = text[:longest] + " …"
    ticks = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
