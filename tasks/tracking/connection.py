"""The connection to one MLflow: its client, how its failures are reported, and how long to wait for it.

Importing MLflow takes a second, so nothing here does so before the first call.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo.errors import InputError
from grpo.processes.exhausted import OUT_OF_MEMORY, says_out_of_memory, text_says_full
from grpo.secret_values import without_user
from tasks.tracking.database import make_database
from tasks.tracking.names import metric_name
from tasks.tracking.outbox import Outbox, is_refused, unbroken

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_AWAY_S = 300.0
"""Seconds to wait for a server that was up before, when a stage begins and before its artifact is published."""
MAX_LOCKED_S = 20.0
"""Seconds for which a database file may be locked or full when a run ends."""
AWAY_POLL_S = 2.0
_VIEW = "?workflowType=machine_learning"  # without it, pages open in the view for agents and prompts
_T = TypeVar("_T")


def default_uri(home: Path) -> str:
    """A tracking store in the home folder that needs no server."""
    return f"sqlite:///{home.resolve() / 'mlflow.db'}"


class Connection:
    """MLflow at `uri`: a server's address, or a `sqlite:///` file."""

    def __init__(self, uri: str, expected: bool = False):
        """`expected`: the server is known to be up, because the same installation starts it."""
        self.uri = uri
        self._reached = expected
        self.sqlite = Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None
        self.outbox = Outbox(uri)
        # Notice a dead server within seconds: metrics wait here in the meantime, and the trainer still has to be
        # watched.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results

    @functools.cached_property
    def client(self) -> MlflowClient:
        import mlflow

        # These loggers report each step of creating a database, and tracebacks of errors that are reported here anyway.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        # Logs its start and end, and failures that are reported here anyway.
        logging.getLogger("mlflow.system_metrics.system_metrics_monitor").setLevel(logging.CRITICAL)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # logs every retry
        # Registering a model version looks up its model at the global URI, whatever the client's URI is.
        mlflow.set_tracking_uri(self.uri)
        if self.sqlite:
            make_database(self.sqlite)
        return mlflow.MlflowClient(self.uri, self.uri)

    def open(self) -> None:
        """Loads MLflow and its database now, before the first call. Raises InputError if MLflow cannot be reached."""
        self.or_stop(self.probe)

    def probe(self) -> None:
        """Makes one cheap request, which fails if MLflow cannot be reached."""
        self.client.search_experiments(max_results=1)

    def page(self, run_id: str, file: str = "") -> str | None:
        """The URL of a run, or of one of its files, in MLflow's UI; None without a server."""
        if not self.uri.startswith(("http://", "https://")):
            return None
        run = self.or_stop(lambda: self.client.get_run(run_id))
        server = without_user(self.uri).rstrip("/")
        address = f"{server}/#/experiments/{run.info.experiment_id}/runs/{run_id}"
        return f"{address}/artifacts/{file}{_VIEW}" if file else f"{address}{_VIEW}"

    def experiments(self) -> list[str]:
        """The ids of all experiments."""
        return [experiment.experiment_id for experiment in every_result(self.client.search_experiments)]

    def recipes(self) -> list[str]:
        """The recipes that have run, which are the experiments but MLflow's own. Raises InputError if MLflow cannot be
        reached."""
        names = self.ask(lambda client: [experiment.name for experiment in every_result(client.search_experiments)])
        return sorted(name for name in names if name != "Default")

    def experiment(self, name: str) -> str:
        """The id of an experiment. Creates it if it does not exist."""
        from mlflow.exceptions import MlflowException

        if not (experiment := self.client.get_experiment_by_name(name)):
            location = None
            if self.sqlite:
                location = (self.sqlite.resolve().parent / "mlartifacts" / metric_name(name)).as_uri()
            try:
                return str(self.client.create_experiment(name, artifact_location=location))
            except MlflowException:  # another process has created it in the meantime
                if not (experiment := self.client.get_experiment_by_name(name)):
                    raise
        if experiment.lifecycle_stage == "deleted":
            remedy = f"restore it with `mlflow experiments restore -x {experiment.experiment_id}`"
            raise InputError(f"the MLflow experiment {name!r} was deleted; {remedy}")
        return str(experiment.experiment_id)

    def ask(self, query: Callable[[MlflowClient], _T]) -> _T:
        """The result of a query to MLflow's client. Raises InputError if MLflow cannot be reached."""
        return self.or_stop(lambda: query(self.client))

    def or_stop(self, call: Callable[[], _T], patience_s: float = 0.0) -> _T:
        """Makes a call that the run cannot continue without. Retries for `patience_s` seconds if the server is
        unavailable.

        A server that was up before is always waited for: it may be slow under load, or be restarting.

        Raises:
            InputError: MLflow could not be reached, or refused the call; the message names the remedy.
        """
        deadline = time.monotonic() + (MAX_AWAY_S if self._reached else patience_s)
        while True:
            try:
                with unbroken(self.uri):
                    value = call()
                self._reached = True
                return value
            except InputError:
                raise
            except Exception as error:  # boundary to MLflow: sqlalchemy, requests and MLflow errors arrive here
                if says_out_of_memory(error):
                    raise InputError(OUT_OF_MEMORY) from error
                if not is_refused(error) and not self.sqlite and time.monotonic() < deadline:
                    self.outbox.warn("a call that is repeated", error)
                    time.sleep(AWAY_POLL_S)
                    continue
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                if self.sqlite and text_says_full(reason):
                    raise InputError(
                        f"no space left on {self.sqlite.parent}: free some or move the home folder with R1FLOW_HOME"
                    ) from error
                if "out-of-date database schema" in reason:
                    raise InputError(
                        f"MLflow's database {self.uri} has the schema of another version; copy it, then run `mlflow db "
                        f"upgrade {self.uri}`"
                    ) from error
                if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", reason):  # below six layers of "failed with"
                    reason = system[1]
                raise InputError(f"MLflow at {self.uri} failed: {reason[:300]}; {self._remedy(reason)}") from error

    def _remedy(self, reason: str) -> str:
        if not self.sqlite:
            return "start that server or give another tracking uri"
        if "malformed" in reason or "not a database" in reason:
            return "that file is damaged: restore it from a copy, or move it away, and a new one begins"
        return "look at that file, or give another tracking uri"


def every_result(search: Callable[..., Any], *arguments: Any, **keywords: Any) -> Iterator[Any]:
    """The results of one of MLflow's searches from all of its pages; by itself, a search returns the first page."""
    token = None
    while True:
        page = search(*arguments, **keywords, page_token=token)
        yield from page
        if not (token := page.token):
            return
