"""Rows of JSONL, CSV and parquet files and of Hugging Face data sets, each with its place.

A row that cannot be read is yielded as an error with the reason, and reading continues. An unreadable file raises.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.errors import InputError
from tasks.paths import expanded
from tasks.problems.sources import FileSource, HubSource, short

csv.field_size_limit(2**27)  # characters of a cell; by itself, 131,072: less than some tests of programs have

Row = tuple[str, dict[str, Any] | InputError]
"""The row's place ("train.jsonl, line 7"), for messages, and its columns or the error."""


def rows(source: FileSource | HubSource) -> Iterator[Row]:
    """The raw rows of a source, which is a file or a hub data set."""
    if isinstance(source, HubSource):
        return dataset_rows(source.name, source.config, source.split)
    return file_rows(source.path)


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of one file. The file extension determines the format."""
    reader = _FORMATS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: extension {path.suffix!r} is not supported; use {', '.join(_FORMATS)}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give one file, or read the folder with kind 'dataset'")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return reader(path)


def _decoded(line: bytes, number: int, path: Path) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte 0x{line[error.start]:02x} at column {error.start + 1} is not UTF-8; "
            "convert the file, e.g. with iconv -t utf-8"
        ) from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if number == 1 and line.lstrip().startswith(b"["):
                raise InputError(f"{where}: a JSON array; one object a line is needed: jq -c '.[]' {path.name}")
            if not line.strip():
                continue
            try:
                yield where, _json_object(_decoded(line, number, path), where)
            except InputError as error:
                yield where, error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # for example a number of 5,000 digits, or 100,000 brackets
        raise InputError(f"{where}: not usable JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(
            f'{where}: {short(row)} is no object; a row is {{"prompt": ..., ...}}, a value for each column'
        )
    return row


def _csv_rows(path: Path) -> Iterator[Row]:
    faulty: list[InputError] = []  # lines of the row being read

    def lines(file: BinaryIO) -> Iterator[str]:
        for number, line in enumerate(file, 1):
            try:
                yield _decoded(line, number, path)
            except InputError as error:
                if number == 1:
                    raise
                faulty.append(error)
                yield line.decode("utf-8", "replace")

    with path.open("rb") as file:
        reader = csv.DictReader(lines(file), strict=True)
        try:
            header = reader.fieldnames or []
            if twice := [name for name, times in Counter(header).items() if times > 1]:
                raise InputError(f"{path}, line 1: column {twice[0]!r} stands twice in the header")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if faulty:
                    yield where, faulty[0]
                    faulty.clear()
                elif None in row or None in row.values():
                    cells = sum(v is not None for k, v in row.items() if k is not None) + len(row.get(None) or [])
                    fault = f"{where}: {cells} cells under a header of {len(header)}; quote cells with commas"
                    yield where, InputError(fault)
                else:
                    yield where, row
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable parquet file: {_first_line(error)}") from None


def dataset_rows(name: str, config: str | None, split: str) -> Iterator[Row]:
    """Rows of a Hugging Face data set: a name on the hub, or a local folder."""
    import datasets

    folder = expanded(name)
    try:
        if (folder / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(folder)
            if split not in data:
                raise InputError(f"{folder}: no split {split!r}; the splits are {', '.join(data)}")
            data = data[split]
        elif (folder / "state.json").is_file():
            data = datasets.load_from_disk(folder)
        else:
            data = datasets.load_dataset(str(folder) if folder.is_dir() else name, config, split=split)
    except InputError:
        raise
    except Exception as error:  # boundary: for a bad name or no network, the library raises a dozen unrelated types
        hint = "" if folder.is_dir() else "; no such folder here: check the name and the network, or give a folder"
        raise InputError(f"data set {name!r} cannot be read: {_first_line(error)}{hint}") from None
    for number, row in enumerate(data, 1):
        yield f"{name}, row {number}", row


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
}
