"""Addresses of a fleet: a fixed list, or a file that is read again when it changes."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from grpo.errors import InputError
from grpo.secret_values import masked

logger = logging.getLogger(__name__)

ADDRESS = r"^https?://[^/\s@]+(/\S*)?$"
"""Pattern of an endpoint's address. A user and password would be recorded, and are not accepted."""
_LOOK_AGAIN_S = 1.0


class Addresses:
    """`current` is the list to use now. A file has one address a line; lines that begin with # are comments."""

    def __init__(self, fixed: Sequence[str], file: Path | None):
        """Takes the addresses of `file` if given, otherwise `fixed`.

        Raises:
            InputError: the file cannot be read, has no address, or has a line that is none.
        """
        self._file, self._changed, self._looked = file, 0, time.monotonic()
        self.current = [*dict.fromkeys(fixed)]
        if file is not None:
            self._changed, self.current = _read(file)

    def refresh(self, now: float) -> bool:
        """Reads the file again if it has changed; at most once a second. Returns whether the list is another one. A
        file that has become unreadable is logged, and the last list stays."""
        if self._file is None or now < self._looked + _LOOK_AGAIN_S:
            return False
        self._looked = now
        try:
            if self._file.stat().st_mtime_ns == self._changed:
                return False
            self._changed, addresses = _read(self._file)
        except (InputError, OSError) as error:
            logger.warning("engine: %s; the %d addresses read before stay", error, len(self.current))
            self._looked = now + 30 * _LOOK_AGAIN_S
            return False
        changed, self.current = addresses != self.current, addresses
        return changed


def _read(file: Path) -> tuple[int, list[str]]:
    """Time of change, ns, and the addresses in the file, each once."""
    try:
        changed, text = file.stat().st_mtime_ns, file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"urls_file {file}: cannot be read ({masked(str(error))})") from None
    addresses = []
    for number, line in enumerate(text.splitlines(), 1):
        address = line.strip()
        if not address or address.startswith("#"):
            continue
        if not re.fullmatch(ADDRESS, address):
            raise InputError(
                f"urls_file {file}, line {number}: {masked(address)[:80]!r} is no address such as http://node7:8000/v1"
            )
        addresses.append(address)
    if not addresses:
        raise InputError(f"urls_file {file}: has no address; write one a line, such as http://node7:8000/v1")
    return changed, [*dict.fromkeys(addresses)]
