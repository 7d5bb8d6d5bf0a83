"""Shards: problem sets split into files that are sampled one by one, and batches of a shard's samples.

A shard's key covers its problems, the policy, the engine with its sampling settings, the user's own code, limits of
rewards that are not the default, and the seed, but not its position. So if a source is added, samples of the other
sources' shards are reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo.data.records import Problem, read_rows
from grpo.errors import InputError
from tasks.sft_data.statistics import DROPPED, KEPT

VERSION = 1
"""Part of every key; raised when the same settings give different samples."""
COLUMNS = (
    *("problem_id", "completion", "summary", "domain", "source", "language", "policy", "engine", "verdict", "reason"),
    *("number", "tokens", "prompt_tokens"),
)
"""Columns of a sample that mixing reads."""
_BATCH_ROWS, _BATCH_BYTES = 8192, 32 * 2**20


@dataclass(frozen=True)
class ProblemShard:
    """Consecutive problems of one source."""

    key: str
    source: str
    rows: int
    problems: Path

    def samples(self, folder: Path) -> Path:
        """Path where the job of grpo/sampling/job.py writes this shard's samples."""
        return folder / self.key / "shard-00000.parquet"

    def is_sampled(self, folder: Path) -> bool:
        """Whether that file is there. Marks its folder as used now, for `unused`."""
        path = self.samples(folder)
        with contextlib.suppress(FileNotFoundError, PermissionError):  # it may be somebody else's in a shared home
            os.utime(path.parent)
        return path.exists()

    def is_general(self) -> bool:
        """Whether its problems are general prompts. A teacher, if there is one, answers these only."""
        return next(read_rows(self.problems, Problem)).domain == "general"


def unused(folder: Path, since: float) -> list[Path]:
    """Folders of shards below `folder` that nobody has sampled or used since a time, seconds since 1970."""
    shards = [path for path in sorted(folder.glob("*")) if path.is_dir()]
    return [path for path in shards if all(file.stat().st_mtime < since for file in [path, *path.rglob("*")])]


def cut(
    problems: Path, limits: Mapping[str, int], size: int, made_by: Mapping[str, Any], seed: int, folder: Path
) -> list[ProblemShard]:
    """Writes the problems into files of at most `size` in `folder`, by source, and returns the shards in order.

    `limits`: maximum number of problems of each domain, drawn by hash of (seed, id) from all of its sources. `made_by`:
    everything else that the samples depend on. Hashes decide which problems are drawn and which share a shard. So
    adding a source changes at most the last shards of the others, and none if the limit is not reached.
    """
    table = pq.read_table(problems)
    keys = np.array([_key(seed, name) for name in table["id"].to_pylist()], dtype=np.uint64)
    domains, sources = np.array(table["domain"].to_pylist()), np.array(table["source"].to_pylist())
    chosen = np.zeros(len(keys), bool)
    for domain, limit in limits.items():
        rows = np.flatnonzero(domains == domain)
        chosen[rows[np.argsort(keys[rows])][:limit]] = True
    if not chosen.any():
        raise InputError(f"{problems}: no problems of {', '.join(limits)} to sample")
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for source in sorted(set(sources[chosen])):
        rows = np.flatnonzero(chosen & (sources == source))
        rows = rows[np.argsort(keys[rows])]
        for start in range(0, len(rows), size):
            shards.append(_write(table.take(rows[start : start + size]), str(source), made_by, folder))
    return shards


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8, person=b"problems").digest())


def _write(table: pa.Table, source: str, made_by: Mapping[str, Any], folder: Path) -> ProblemShard:
    digest = hashlib.sha256(json.dumps([VERSION, made_by], sort_keys=True, ensure_ascii=False).encode())
    for row in table.to_pylist():
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode())
    key = digest.hexdigest()
    path = folder / f"{key}.parquet"
    if not path.exists():
        writing = path.with_suffix(".writing")
        pq.write_table(table, writing)
        writing.replace(path)
    return ProblemShard(key, source, table.num_rows, path)


def sample_batches(shard: Path) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first row, rows) of a shard of judged samples, in batches of limited rows and bytes.

    Raises InputError for an unreadable file, a missing column, or a sample without a verdict.
    """
    try:
        file = pq.ParquetFile(shard)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{shard}: not a readable parquet file ({error})") from None
    with file:
        if missing := set(COLUMNS) - set(file.schema_arrow.names):
            raise InputError(f"{shard}: column {sorted(missing)[0]!r} is missing; a shard of samples needs it")
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        row_bytes = sum(group.total_byte_size for group in groups) / max(1, file.metadata.num_rows)
        rows = max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1, row_bytes))))
        start = 0
        for batch in file.iter_batches(rows, columns=list(COLUMNS)):
            table = pa.Table.from_batches([batch])
            judged = pc.or_(
                pc.equal(table["verdict"], KEPT),
                pc.and_(pc.equal(table["verdict"], DROPPED), pc.not_equal(table["reason"], "")),
            )
            if not pc.all(judged, min_count=0).as_py():
                raise InputError(
                    f"{shard}: a sample has no verdict, or was dropped for no reason; filter before mixing"
                )
            yield start, table
            start += len(table)
