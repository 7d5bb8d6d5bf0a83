"""Sorts more rows than fit into memory, through bucket files that each cover a range of positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, PART_BYTES = 4096, 64 * 2**20
"""Maximum rows and bytes of a parquet file; whichever limit is reached first applies."""

_BUCKETS = 256  # open files at a time
_BUFFER_BYTES = 64 * 2**20


class Shuffle:
    """Takes rows in any order, each with its position from 0 to `rows` - 1, and writes them in order.

    Output files are `out`/part-NNNNN.parquet; without rows, the folder is not created. `size` is the approximate total
    size in bytes, which decides how many rows make a part. Memory holds a buffer and, at the end, one bucket: one part,
    or several if there are more than _BUCKETS parts. `work` is removed at the end.
    """

    def __init__(self, out: Path, work: Path, rows: int, size: int, schema: pa.Schema):
        self._out, self._work = out, work
        self._rows = rows
        self._schema = schema.append(pa.field("place", pa.int64()))
        self._part_rows = max(1, min(ROWS, rows * PART_BYTES // max(1, size)))
        parts = -(-rows // self._part_rows)
        self._bucket_rows = self._part_rows * max(1, -(-parts // _BUCKETS))
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}
        self._buffer: list[pa.Table] = []
        self._buffered = 0

    def add(self, table: pa.Table, places: np.ndarray) -> None:
        if len(table):
            self._buffer.append(table.append_column("place", pa.array(places, pa.int64())))
            self._buffered += self._buffer[-1].nbytes
        if self._buffered > _BUFFER_BYTES:
            self._spill()

    def _spill(self) -> None:
        table = pa.concat_tables(self._buffer)
        table = table.take(np.argsort(table["place"].to_numpy()))
        bucket = table["place"].to_numpy() // self._bucket_rows
        numbers, starts = np.unique(bucket, return_index=True)
        for number, start, end in zip(numbers.tolist(), starts, [*starts[1:], len(table)], strict=True):
            self._writer(number).write_table(table.slice(start, end - start))
        self._buffer, self._buffered = [], 0

    def _writer(self, number: int) -> pa.RecordBatchStreamWriter:
        if number not in self._writers:
            self._work.mkdir(parents=True, exist_ok=True)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writers[number] = pa.ipc.new_stream(self._path(number), self._schema, options=options)
        return self._writers[number]

    def _path(self, number: int) -> Path:
        return self._work / f"{number:05d}.arrows"

    def finish(self) -> None:
        """Writes the parts."""
        if not self._rows:
            return
        if self._buffer:
            self._spill()
        for writer in self._writers.values():
            writer.close()
        self._out.mkdir(parents=True)
        written = sum(self._write(number) for number in sorted(self._writers))
        assert written == self._rows, f"{written} rows of {self._rows}"
        self._work.rmdir()

    def _write(self, number: int) -> int:
        """Writes a bucket's parts, deletes the bucket, and returns its number of rows."""
        with pa.ipc.open_stream(self._path(number)) as stream:
            table = stream.read_all()
        order = np.argsort(table["place"].to_numpy())
        first = number * self._bucket_rows
        in_order = table["place"].to_numpy()[order]
        assert np.array_equal(in_order, np.arange(first, first + len(table))), "a row is missing, or is there twice"
        for start in range(0, len(table), self._part_rows):
            rows = table.drop_columns("place").take(order[start : start + self._part_rows])
            path = self._out / f"part-{(first + start) // self._part_rows:05d}.parquet"
            pq.write_table(rows.combine_chunks(), path, compression="zstd")
        self._path(number).unlink()
        return len(table)
