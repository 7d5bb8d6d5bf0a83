"""Messages from a trainer to the user of the command that started it; all other output stays in the trainer's log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

PREFIX = "notice: "
MAX_WARNINGS = 100
"""Warnings of one trainer that are forwarded; the rest stay in its log."""


def notice(text: str) -> None:
    """Writes one line to stderr (the trainer's log), from which the launcher forwards it while the trainer runs."""
    print(PREFIX + " ".join(text.split()), file=sys.stderr, flush=True)


def is_heard() -> bool:
    """Whether the launcher reads this process's notices, and nobody else writes the same: it is the first one of the
    first machine. That need not be RANK 0, because torchrun sorts machines by host name."""
    return {os.environ.get(name, "0") for name in ("PET_NODE_RANK", "LOCAL_RANK")} == {"0"}


@contextlib.contextmanager
def warnings_as_notices() -> Iterator[None]:
    """Forwards the warnings that this library logs, such as those of the health checks, as notices meanwhile.

    Each text is forwarded once, at most `MAX_WARNINGS` in all; the others are plain lines of the log. Of several
    processes of a job, only the one that `is_heard` forwards: the others warn of the same.
    """
    if not is_heard():
        yield
        return
    logger, handler = logging.getLogger("grpo"), _Notices(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Notices(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self._forwarded: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # arguments that do not fit the message must not end the training
            self.handleError(record)
            return
        if text not in self._forwarded and len(self._forwarded) < MAX_WARNINGS:
            self._forwarded.add(text)
            notice(text)
            if len(self._forwarded) == MAX_WARNINGS:
                notice(f"{MAX_WARNINGS} warnings so far; any further ones are only in the trainer's log")
        else:
            print(text, file=sys.stderr, flush=True)
