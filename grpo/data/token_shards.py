"""Training sequences as token ids on disk: tokenised once, mapped into memory, shared by all processes of a job.

A folder has numbered shards, each with SHARD_ROWS rows of the data in order: `00000.ids.npy`, uint32, prompts and
completions one after the other, and `00000.lengths.npy`, int32 [S, 2], the token counts of each sequence's prompt and
completion. Lengths are written last, so a restarted job tokenises only the missing shards. Rows that are omitted, such
as those that are too long, are in no shard. A process holds SAMPLE_BYTES per sequence; tokens stay in the files, whose
pages the operating system shares among processes and drops when memory runs short.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from grpo.data.examples import Example

SHARD_ROWS = 8192
BATCH_ROWS = 256
"""Rows tokenised at a time; until they are written they take 36 bytes per token."""
SAMPLE_BYTES = 16 + 36
"""Memory per sequence: two lengths and an offset in numpy, plus a Python integer and its slot in an epoch's order."""
_SOURCE = "source.json"

Row = dict[str, Any]
Tokenize = Callable[[list[Row]], list[Example]]
"""Rows -> sequences of the rows that are trained on, one prompt and one rest each, in order."""


def start(folder: Path, source: dict[str, Any]) -> None:
    """Creates the folder for shards of `source`: JSON values that identify everything the tokens depend on. Deletes
    shards of another source. One process must call it before any process writes."""
    named = json.dumps(source, sort_keys=True)
    path = folder / _SOURCE
    if not path.is_file() or path.read_text() != named:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _replace(path, lambda partial: partial.write_text(named))


def write(folder: Path, rows: Iterable[Row], count: int, tokenize: Tokenize, rank: int = 0, world: int = 1) -> None:
    """Writes the missing shards among every `world`-th shard from number `rank` on. `count`: number of rows."""
    missing = {n for n in range(rank, _shards(count), world) if not _lengths(folder, n).is_file()}
    stream = iter(rows)
    for number in range(max(missing, default=-1) + 1):
        shard = itertools.islice(stream, SHARD_ROWS)
        if number in missing:
            _write_shard(folder, number, shard, tokenize)
        else:
            for _ in shard:
                pass


class TokenShards(Sequence[Example]):
    """The sequences of a folder completed by `write`, in data order."""

    def __init__(self, folder: Path, count: int):
        """`count`: number of rows passed to `write`, including omitted ones."""
        numbers = range(_shards(count))
        lengths = [np.load(_lengths(folder, number)) for number in numbers]
        self._ids = [np.load(_ids(folder, n), mmap_mode="r") if len(lengths[n]) else None for n in numbers]
        self._firsts = np.cumsum([0, *map(len, lengths)])  # index of the first sequence of each shard
        lengths.append(np.empty((0, 2), np.int32))
        self._prompts, self._rests = np.ascontiguousarray(np.concatenate(lengths).T)
        sizes = (part.sum(1, dtype=np.int64) for part in lengths)
        self._begins = np.concatenate([np.cumsum(size) - size for size in sizes])  # offsets in the shard's ids
        self.left_out = count - len(self)

    def tokens(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Token counts of the sequences, int32 [N]; no tokens are read."""
        counts: np.ndarray[Any, np.dtype[np.int32]] = self._prompts + self._rests
        return counts

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        ids = self._ids[int(np.searchsorted(self._firsts, index, side="right")) - 1]
        assert ids is not None
        begin, prompt, rest = (int(of[index]) for of in (self._begins, self._prompts, self._rests))
        middle = begin + prompt
        return Example([ids[begin:middle].tolist()], [ids[middle : middle + rest].tolist()], weight=rest)


def _write_shard(folder: Path, number: int, rows: Iterable[Row], tokenize: Tokenize) -> None:
    ids: list[Any] = [np.empty(0, np.uint32)]
    lengths: list[tuple[int, int]] = []
    stream = iter(rows)
    while batch := list(itertools.islice(stream, BATCH_ROWS)):
        for example in tokenize(batch):
            (prompt,), (rest,) = example.prompts, example.rests
            ids += [np.array(prompt, np.uint32), np.array(rest, np.uint32)]
            lengths.append((len(prompt), len(rest)))
        ids = [np.concatenate(ids)]
    _replace(_ids(folder, number), lambda partial: _save(partial, ids[0]))
    _replace(_lengths(folder, number), lambda partial: _save(partial, np.array(lengths, np.int32).reshape(-1, 2)))


def _save(path: Path, array: Any) -> None:
    with path.open("wb") as file:  # np.save would add .npy to the name
        np.save(file, array)


def _replace(path: Path, write_to: Callable[[Path], object]) -> None:
    partial = path.with_name(path.name + ".partial")
    write_to(partial)
    os.replace(partial, path)


def _shards(count: int) -> int:
    return -(-count // SHARD_ROWS)


def _ids(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.ids.npy"


def _lengths(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.lengths.npy"
