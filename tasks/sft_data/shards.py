"""Problems cut into shards: each is sampled by itself, and what it became is found again by what it was made from.

A shard's key covers its problems, the policy, the engine and how it samples, and the seed, not where it stands: with
another source added, the shards of the others are those of the last run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo.errors import InputError

VERSION = 1
"""Changes with what sampling makes of the same settings."""


@dataclass(frozen=True)
class ProblemShard:
    key: str
    source: str
    rows: int
    problems: Path

    def samples(self, folder: Path) -> Path:
        """Where the job of grpo/sampling/job.py writes what becomes of it."""
        return folder / self.key / "shard-00000.parquet"


def cut(
    problems: Path, limits: Mapping[str, int], size: int, made_by: Mapping[str, Any], seed: int, folder: Path
) -> list[ProblemShard]:
    """Write the problems into files of at most `size` in `folder`, by source, and return them in order.

    `limits`: most problems of each domain, a draw by hash of (seed, id) from all of its sources. `made_by`: what the
    samples depend on besides the problems. Which problems are drawn, and which share a shard, follows from hashes: a
    source that is added changes at most the last shards of the others, and none where the limit leaves all in.
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
