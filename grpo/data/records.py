"""Problems and samples: the parquet rows that every stage reads and writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.errors import InputError

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": str}``"""


@dataclass(frozen=True)
class Problem:
    """A prompt and everything needed to score an answer to it.

    `domain` selects the reward branch: reasoning problems are verified, general prompts are judged.
    `verifier` names an entry of `grpo.rewards.verifiers.VERIFIERS`, which reads `metadata`.
    """

    id: str
    messages: list[Message]
    answer: str
    verifier: str
    domain: Literal["reasoning", "general"]
    language: str
    source: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The user's messages, for hashing, decontamination and display."""
        return "\n".join(m["content"] for m in self.messages if m["role"] == "user")


@dataclass(frozen=True)
class Sample:
    """One completion of one problem, with its parts, rewards and verdict."""

    problem_id: str
    policy: str
    completion: str
    reasoning: str
    summary: str
    answer: str
    rewards: dict[str, float]
    tokens: int
    finish_reason: Literal["stop", "length"]
    domain: str
    language: str
    number: int = 0  # index among its problem's samples
    source: str = ""  # the problem's source
    engine: str = ""  # the engine that sampled the completion
    prompt_tokens: int = 0
    verdict: str = ""
    reason: str = ""


_JSON_FIELDS = {"metadata", "rewards"}
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_JSON_FIELDS, (dict, "a JSON object")),
    **dict.fromkeys(("tokens", "number", "prompt_tokens"), (int, "a whole number")),
    "messages": (list, "a list of {role, content}"),
}
"""Field -> its type in Python, and what messages call it; all others are text."""
_TYPES = {"messages": _MESSAGES, "tokens": pa.int64(), "number": pa.int64(), "prompt_tokens": pa.int64()}


def _schema(cls: type) -> pa.Schema:
    return pa.schema([(f.name, _TYPES.get(f.name, pa.string())) for f in dataclasses.fields(cls)])


def _to_row(item: Problem | Sample) -> dict[str, Any]:
    row = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {k: json.dumps(v, sort_keys=True, ensure_ascii=False) if k in _JSON_FIELDS else v for k, v in row.items()}


def _from_row(cls: type, row: dict[str, Any], where: str) -> Any:
    values = {}
    for name, value in row.items():
        kind, needed = _KINDS.get(name, (str, "text"))
        if name in _JSON_FIELDS and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: {name} is {value!r:.60}, which is not JSON: {error}") from None
        if not isinstance(value, kind) or (kind is list and not all(map(_is_message, value))):
            raise InputError(f"{where}: {name} is {value!r:.60}; {needed} is needed")
        values[name] = value
    return cls(**values)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def write_rows(path: Path, items: Sequence[Problem] | Sequence[Sample], cls: type) -> None:
    """Writes one parquet shard; `cls` sets the columns even if there are no rows."""
    rows = [_to_row(item) for item in items]
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(cls)), path)


def read_rows(paths: Path | Iterable[Path], cls: type) -> Iterator[Any]:
    """Streams `Problem`s or `Sample`s from one shard, a folder of shards, or several paths.

    Raises InputError for a missing path, a file that is not parquet or damaged, a missing column, or a wrong value.
    """
    columns = _schema(cls).names
    for shard in _shards(paths):
        number = 0
        try:
            file = pq.ParquetFile(shard)
            if missing := set(columns) - set(file.schema_arrow.names):
                raise InputError(f"{shard}: column {sorted(missing)[0]!r} is missing; a {cls.__name__} shard needs it")
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield _from_row(cls, row, f"{shard}, row {number}")
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{shard}: not a readable parquet file ({error})") from None


def read_problems(paths: Path | Iterable[Path]) -> list[Problem]:
    """All problems of parquet files or folders, in order."""
    return list(read_rows(paths, Problem))


def read_samples(paths: Path | Iterable[Path]) -> list[Sample]:
    """All samples of parquet files or folders, in order."""
    return list(read_rows(paths, Sample))


def read_columns(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a parquet file or folder with the required `columns` and the `optional` ones that exist.

    Raises InputError if it cannot be read or a required column is missing.
    """
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: not a readable parquet file or folder ({error})") from None
    if missing := set(columns) - set(table.column_names):
        needed = ", ".join(columns)
        raise InputError(f"{path}: column {sorted(missing)[0]!r} is missing; this kind of training needs {needed}")
    rows: list[dict[str, Any]] = table.select(
        [*columns, *(name for name in optional if name in table.column_names)]
    ).to_pylist()
    return rows


def _shards(paths: Path | Iterable[Path]) -> Iterator[Path]:
    for path in [paths] if isinstance(paths, Path) else paths:
        if path.is_dir():
            shards = sorted(path.glob("*.parquet"))
            if not shards:
                raise InputError(f"{path}: no parquet shards in this folder")
            yield from shards
        elif path.is_file():
            yield path
        else:
            raise InputError(f"{path}: no such file or folder")
