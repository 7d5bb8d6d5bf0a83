"""What a shard of samples has so far: one line a group, kept as it is made, so that a killed worker loses nothing that
it had finished."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

_SYNC_S = 1.0


class Journal:
    """Lines appended to a file that one process at a time may hold."""

    def __init__(self, path: Path):
        """Raises BlockingIOError while another process holds it; the system lets go of it when that process ends."""
        self.path = path
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def lines(self) -> list[Any]:
        """What it holds; half a line at its end, from a process that was killed while it wrote, is cut off."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, line: Any) -> None:
        """At once in the file, and on the disk within a second."""
        self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def close(self) -> None:
        self._file.close()
