"""Blocks in which SIGINT and SIGTERM wait for the end of a step, wait for the end of the block, or are ignored."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context in which SIGTERM does not end the process but sets `asked`, for a job that writes a checkpoint after the
    step that it is in. Only the main thread can set handlers; in another one, SIGTERM keeps its effect."""

    def __init__(self) -> None:
        self.asked = False
        self._process = os.getpid()
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number: int, _: object) -> None:
        self.asked = True
        if os.getpid() != self._process:  # a forked child has nothing to save
            self.end()

    def end(self) -> None:
        """Ends this process as SIGTERM would have done."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def signals_delayed() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until the end of the block, for work that must not end half-way. In another thread than
    the main one, which alone runs handlers, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) is not None}
    noted: list[int] = []
    delaying = True

    def handle(number: int, _: object) -> None:
        if delaying:
            noted.append(number)
            return
        signal.signal(number, before[signal.Signals(number)])  # it came while the handlers below are put back
        signal.raise_signal(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        delaying = False
        for number, handler in before.items():
            signal.signal(number, handler)
        for came in dict.fromkeys(noted):
            signal.raise_signal(came)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM in the block, for the end of work that was told to stop already. In another thread
    than the main one, which alone runs handlers, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
