"""The journal of a shard: one line per event of a group, written as it happens, so that a killed worker loses no
finished group. Each line starts with the CRC-32 of the rest."""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

_SYNC_S = 1.0


class Journal:
    """An append-only file that one process at a time may hold."""

    def __init__(self, path: Path):
        """Raises BlockingIOError if another process holds the file; the system releases it when that process ends."""
        self.path = path
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def lines(self) -> list[Any]:
        """Returns the lines so far. Truncates the file after the last complete line: removes an incomplete line of a
        process that was killed while writing or, on a damaged disk, everything from the first damaged line on."""
        self._file.seek(0)
        data = self._file.read()
        read, end = [], 0
        for line in data.split(b"\n")[:-1]:
            checksum, _, text = line.partition(b" ")
            try:
                if checksum != _checksum(text):
                    break
                read.append(json.loads(text))
            except (ValueError, RecursionError):
                break
            end += len(line) + 1
        if end < len(data):
            self._file.truncate(end)
        return read

    def append(self, line: Any) -> None:
        """Appends a line. It is in the file immediately, and synced to disk if the last sync was over a second ago."""
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()
        self._file.write(_checksum(text) + b" " + text + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        self._file.close()


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
