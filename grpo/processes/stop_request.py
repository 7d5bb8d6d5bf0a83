"""Lets a job that is told to stop write a checkpoint after the step that it is in."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Any


class StopRequest:
    """Context in which SIGTERM does not end the process but sets `asked`. Only the main thread can set handlers; in
    another one, SIGTERM keeps its effect."""

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
