"""Whether files were read, by their access time, which `relatime` moves where it was not behind the last change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LONG_AGO_NS = 10**9 * 3600


class Watched:
    """Files and folders that are to be read or listed; they may be moved and removed meanwhile."""

    def __init__(self, paths: Iterable[Path]):
        self._begun: dict[int, int] = {}
        for path in paths:
            file, now = os.open(path, os.O_RDONLY), path.stat()
            os.utime(file, ns=(now.st_mtime_ns - LONG_AGO_NS, now.st_mtime_ns))
            self._begun[file] = os.fstat(file).st_atime_ns

    def were_read(self) -> bool:
        """Whether one of them was. To be asked once."""
        read = any(os.fstat(file).st_atime_ns != begun for file, begun in self._begun.items())
        while self._begun:
            os.close(self._begun.popitem()[0])
        return read
