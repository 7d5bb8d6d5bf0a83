"""Calls to MLflow that may fail without stopping a run: what it could not be told now, it is told later."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from grpo.errors import InputError

logger = logging.getLogger(__name__)

_TRIES = 3


@dataclass
class Waiting:
    """Something that MLflow failed to record, and how often it failed while other things succeeded."""

    what: str
    call: Callable[[], object]
    tries: int = 0


class Delivery:
    """What MLflow at `uri` has not been told yet. That it fails is said once, and once that it works again."""

    def __init__(self, uri: str):
        self.uri = uri
        self.waiting: list[Waiting] = []
        self._warned = False

    def later(self, what: str, call: Callable[[], object]) -> None:
        """Do it, now or with a later call that succeeds."""
        if self.now(what, call):
            self.retry()
        else:
            self.waiting.append(Waiting(what, call))

    def retry(self) -> None:
        """Do what failed before; the caller has just seen MLflow work."""
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            if self.now(entry.what, entry.call):
                continue
            entry.tries += 1
            if entry.tries < _TRIES:
                self.waiting.append(entry)
            else:
                logger.warning("MLflow at %s works but not for %s: giving up on that", self.uri, entry.what)

    def now(self, what: str, call: Callable[[], object]) -> bool:
        """Do it; False if MLflow could not be reached, so that it may be worth another try."""
        try:
            call()
        except Exception as error:  # the boundary to MLflow: each library below it has its own
            if refused(error):
                logger.warning("MLflow refuses %s: %s", what, str(error)[:300])
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
        if not self._warned:
            logger.warning("MLflow at %s fails (%s: %s)", self.uri, what, str(error)[:300])
            self._warned = True


def refused(error: Exception) -> bool:
    """MLflow was reached and will not have it: another try is of no use."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.get_http_status_code() in (400, 404, 409)
