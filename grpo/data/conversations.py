"""Prompts and responses as conversations: the columns of every training data set that is written.

| data set | columns |
|---|---|
| SFT | prompt, completion |
| preference pairs | prompt, chosen, rejected |
| labelled responses | prompt, completion, label |

Prompts and responses are lists of {role, content}; a response is one assistant message. The names and forms are those
of TRL's conversational data sets. In memory a row has `messages`, and responses are plain texts. Earlier versions wrote
rows in that form, so both forms can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from grpo.data.records import Message, read_columns
from grpo.errors import InputError

CONVERSATION = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""Arrow type of a conversation."""
_RESPONSES = ("completion", "chosen", "rejected")


def response(text: str) -> list[Message]:
    """A response as a conversation: one assistant message."""
    return [{"role": "assistant", "content": text}]


def response_column(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Like `response`, for a column of texts without nulls."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    content = pa.array(texts, pa.string())
    role = pa.array(["assistant"], pa.string()).take(pa.array([0] * len(content), pa.int64()))
    turns = pa.StructArray.from_arrays([role, content], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(range(len(content) + 1), pa.int32()), turns).cast(CONVERSATION)


def to_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row to its stored form. A labelled response becomes a `completion` with a boolean `label`."""
    written: dict[str, Any] = {}
    for name, value in row.items():
        name = {"messages": "prompt", "response": "completion"}.get(name, name)
        written[name] = response(value) if name in _RESPONSES else bool(value) if name == "label" else value
    return written


def from_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `to_columns`: `messages`, and responses as texts. Rows of earlier versions pass unchanged."""
    if "prompt" not in row:
        return dict(row)
    labelled = "label" in row
    read: dict[str, Any] = {}
    for name, value in row.items():
        text = value[-1]["content"] if name in _RESPONSES else int(value) if name == "label" else value
        read[{"prompt": "messages", "completion": "response" if labelled else name}.get(name, name)] = text
    return read


def read_rows_of(path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Rows of a parquet file or folder in their in-memory form; `columns` and `optional` are in-memory names.

    Raises InputError if the file cannot be read or a required column is missing.
    """
    names = columns
    if "prompt" in _column_names(path):
        names = tuple({"messages": "prompt", "response": "completion"}.get(name, name) for name in columns)
    return [from_columns(row) for row in read_columns(path, names, optional)]


def demonstrations(path: Path, batch_rows: int = 1024) -> Iterator[dict[str, Any]]:
    """Rows {messages, completion} of SFT data, streamed in order from a parquet file or folder.

    Raises InputError if it cannot be read or a column is missing.
    """
    names = _column_names(path)
    prompt = "prompt" if "prompt" in names else "messages"
    for name in (prompt, "completion"):
        if name not in names:
            raise InputError(f"{path}: column {name!r} is missing; this kind of training needs prompt, completion")
    for batch in _rows(path).to_batches(columns=[prompt, "completion"], batch_size=batch_rows):
        yield from map(from_columns, batch.to_pylist())


def count_demonstrations(path: Path) -> int:
    """The number of rows that `demonstrations` yields, from the files' footers. Raises InputError if they cannot be
    read."""
    _column_names(path)
    return int(_rows(path).count_rows())


def files_of(path: Path) -> list[tuple[str, int, int]]:
    """Name, size in bytes and modification time (ns) of each file in a parquet file or folder, to detect changed
    data."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _column_names(path: Path) -> list[str]:
    try:
        return list(_rows(path).schema.names)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: not a readable parquet file or folder ({error})") from None


def _rows(path: Path) -> Any:
    from pyarrow.dataset import dataset  # slow: imports pandas, and every command imports this module

    return dataset(path, format="parquet")
