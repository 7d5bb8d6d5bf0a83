"""Rows in any order come out in order, from buckets that memory holds."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.sft_data import external_shuffle
from tasks.sft_data.external_shuffle import Shuffle

SCHEMA = pa.schema([("name", pa.string())])


def shuffle(folder: Path, rows: int, seed: int, size: int = 0) -> Shuffle:
    """Rows "0", "1", ... added in an order by `seed`, some at a time."""
    made = Shuffle(folder / "out", folder / "work", rows, size, SCHEMA)
    rng, left = random.Random(seed), list(range(rows))
    rng.shuffle(left)
    while left:
        some, left = left[: (n := rng.randint(0, 9))], left[n:]
        made.add(pa.table({"name": [str(place) for place in some]}, schema=SCHEMA), np.array(some, np.int64))
    return made


@pytest.mark.parametrize(("buckets", "buffer"), [(256, 2**26), (256, 1), (3, 100), (1, 1)])
def test_rows_come_out_by_place_in_parts_of_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: int, buffer: int
) -> None:
    monkeypatch.setattr(external_shuffle, "ROWS", 10)
    monkeypatch.setattr(external_shuffle, "_BUCKETS", buckets)
    monkeypatch.setattr(external_shuffle, "_BUFFER_BYTES", buffer)
    first = {}
    for seed in (0, 1):
        made = shuffle(tmp_path / str(seed), 95, seed)
        made.finish()
        parts = sorted((tmp_path / str(seed) / "out").iterdir())
        assert [part.name for part in parts] == [f"part-{i:05d}.parquet" for i in range(10)]
        assert [pq.read_metadata(part).num_rows for part in parts] == [10] * 9 + [5]
        names = [name for part in parts for name in pq.read_table(part)["name"].to_pylist()]
        assert names == [str(place) for place in range(95)]
        assert not (tmp_path / str(seed) / "work").exists()
        found = {part.name: part.read_bytes() for part in parts}
        assert found == (first := first or found)


def test_long_rows_make_parts_of_fewer(tmp_path: Path) -> None:
    shuffle(tmp_path, 100, 0, size=400 * 2**20).finish()  # 4 MiB a row: 16 of them are 64 MiB
    parts = sorted((tmp_path / "out").iterdir())
    assert [pq.read_metadata(part).num_rows for part in parts] == [16] * 6 + [4]
    assert [name for part in parts for name in pq.read_table(part)["name"].to_pylist()] == [str(i) for i in range(100)]


def test_a_row_that_is_missing_is_noticed(tmp_path: Path) -> None:
    made = Shuffle(tmp_path / "out", tmp_path / "work", 2, 0, SCHEMA)
    made.add(pa.table({"name": ["0"]}), np.array([0]))
    with pytest.raises(AssertionError, match="1 rows of 2"):
        made.finish()


def test_no_rows_make_no_folder(tmp_path: Path) -> None:
    made = Shuffle(tmp_path / "out", tmp_path / "work", 0, 0, SCHEMA)
    made.add(SCHEMA.empty_table(), np.empty(0, np.int64))
    made.finish()
    assert not list(tmp_path.iterdir())
