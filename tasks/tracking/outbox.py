"""Calls to MLflow that may fail without stopping a run. A failed call is repeated later."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from grpo.errors import InputError
from grpo.processes.stop_request import signals_delayed
from grpo.secret_values import masked

logger = logging.getLogger(__name__)

_MAX_TRIES = 3


@dataclass(eq=False)
class PendingCall:
    """A failed call, and how often it failed while other calls succeeded. One that is `needed` is never given up."""

    what: str
    call: Callable[[], object]
    needed: bool = False
    tries: int = 0


class Outbox:
    """Calls that MLflow at `uri` has not received yet. Logs one warning when MLflow fails, and one line when it works
    again.

    `what` is the name of what is recorded, for log messages.
    """

    def __init__(self, uri: str):
        self.uri = masked(uri)
        self.pending: list[PendingCall] = []
        self._warned = False

    def send(self, what: str, call: Callable[[], object], needed: bool = False) -> None:
        """Makes the call now, or after a later call that succeeds. Calls for the same `what` keep their order, because
        the older one may set what the newer one sets."""
        self.pending.append(PendingCall(what, call, needed))
        first = next(entry for entry in self.pending if entry.what == what)
        if self.try_now(what, first.call):
            self.pending.remove(first)
            self.retry()

    def retry(self) -> None:
        """Repeats the calls that failed. For callers that have just seen MLflow work."""
        failed: set[str] = set()
        for entry in [*self.pending]:
            if entry.what in failed:
                continue
            if self.try_now(entry.what, entry.call):
                self.pending.remove(entry)
                continue
            entry.tries += 1
            if entry.needed or entry.tries < _MAX_TRIES:
                failed.add(entry.what)
            else:
                self.pending.remove(entry)
                logger.warning("MLflow at %s works but not for %s: giving up on that", self.uri, entry.what)

    def try_now(self, what: str, call: Callable[[], object]) -> bool:
        """Makes the call once. Returns False if MLflow could not be reached, so that a retry may succeed."""
        try:
            with unbroken(self.uri):
                call()
        except Exception as error:  # boundary to MLflow: each library below it raises its own errors
            if is_refused(error):
                logger.warning("MLflow refuses %s: %s", what, masked(str(error))[:300])
                return True
            if isinstance(error, (FileNotFoundError, InputError)):
                logger.warning("MLflow cannot log %s: %s", what, error)
                return True
            self.warn(what, error)
            return False
        if self._warned:
            logger.info("MLflow at %s works again", self.uri)
            self._warned = False
        return True

    def warn(self, what: str, error: Exception) -> None:
        """Logs a failure, once until MLflow works again."""
        if not self._warned:
            logger.warning("MLflow at %s fails (%s: %s)", self.uri, what, masked(str(error))[:300])
            self._warned = True


def unbroken(uri: str) -> contextlib.AbstractContextManager[None]:
    """For one call to MLflow. Delays signals if it is a file: one that raised within a transaction would leave the file
    locked, and the end of the run could not be recorded. A call to a server may be broken off at any point."""
    return signals_delayed() if uri.startswith("sqlite:") else contextlib.nullcontext()


def is_refused(error: Exception) -> bool:
    """Whether MLflow was reached and rejected the call, so that a retry is pointless."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.get_http_status_code() in (400, 404, 409)
