"""The page of a flow run in Prefect: a link to MLflow, progress, results.

These are Prefect artifacts, not part of a stage's output. If one cannot be shown, a warning is logged. Without a
permanent server, nothing is sent, and Prefect is not loaded.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows.prefect_server import keeps_runs
from flows.progress import duration
from tasks.store.manifest import Manifest

if TYPE_CHECKING:
    from tasks.tracking.client import Tracking

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between updates of a progress bar. A request costs the server 25 ms, and much more if it is busy."""
RETRIES = 3
ANSWER_S = 10.0
"""Timeout of a request in seconds. It is short because the same process watches the trainer."""


class RunPage:
    """The page of the current flow run. `name` is the name of the stage or recipe."""

    def __init__(self, name: str):
        self.name = name
        self._bars: dict[str, UUID] = {}
        self._shown: dict[str, float] = {}

    def link(self, record: Tracking, run_id: str) -> None:
        """Links the MLflow run. If `record` has no server, there is no page to link."""

        def show() -> None:
            from prefect.artifacts import create_link_artifact

            if page := record.page(run_id):
                description = "Parameters, curves, data sets and models of this run."
                create_link_artifact(
                    link=page,
                    link_text="Open in MLflow",
                    key=f"mlflow-{artifact_key(self.name)}",
                    description=description,
                )

        _try("the link to MLflow", show)

    def progress(self, job: str, done: int, of: int, line_text: str) -> None:
        """Updates the progress bar of a job, at most once in EVERY_S unless the job is complete. A failed update is not
        repeated."""
        now = time.monotonic()
        if not of or (done < of and now - self._shown.get(job, -EVERY_S) < EVERY_S):
            return
        self._shown[job] = now
        percent = round(100.0 * min(done, of) / of, 1)
        line = f"{job}: {line_text}" if job else line_text

        def show() -> None:
            from prefect.artifacts import create_progress_artifact, update_progress_artifact

            if job in self._bars:
                update_progress_artifact(self._bars[job], percent, line)
            else:
                key = f"progress-{artifact_key(f'{self.name} {job}')}"
                artifact = create_progress_artifact(percent, key=key, description=line)
                assert isinstance(artifact, UUID)  # it is a coroutine only in asynchronous flows
                self._bars[job] = artifact

        _try("a progress bar", show, retries=0)

    def stage(self, done: int, of: int, text: str) -> None:
        """Shows the number of finished stages of a recipe, and the current one."""
        self._shown.clear()  # reused stages come faster than the interval, and each one should be visible
        self.progress("", done, of, f"{done} of {of} stages done · {text}")

    def result(self, manifest: Manifest, status: str, shown: Callable[[Manifest], str]) -> None:
        """Shows a stage's result: the Markdown returned by `shown`, or else its numbers."""

        def show() -> None:
            from prefect.artifacts import create_markdown_artifact

            lines = [
                f"# {manifest.stage}: {'reused' if status == 'reused' else f'made in {duration(manifest.seconds)}'}",
                shown(manifest) or table({**manifest.counts, **manifest.metrics}),
                f"`r1 show {manifest.key[:12]}` has all of it, and what it was made from.",
            ]
            key = f"result-{artifact_key(self.name)}"
            create_markdown_artifact("\n\n".join(lines), key=key, description=f"What {manifest.stage} made.")

        _try("the result", show)

    def reused(self, record: Tracking, existing: Manifest, shown: Callable[[Manifest], str]) -> None:
        """Shows the result of a reused stage, with a link to the run that made it."""
        if existing.mlflow_run_id:
            self.link(record, existing.mlflow_run_id)
        self.result(existing, "reused", shown)


def table(values: Mapping[str, Any]) -> str:
    """Numbers as a Markdown table. Missing numbers are left out."""
    rows = [f"| {name} | {_number(value)} |" for name, value in values.items() if value is not None]
    return "\n".join(["| Number | Value |", "|---|---:|", *rows]) if rows else ""


def artifact_key(name: str) -> str:
    """`name` as a valid key of a Prefect artifact: lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _try(what: str, show: Callable[[], Any], retries: int = RETRIES) -> None:
    if not keeps_runs():
        return
    from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries, PREFECT_API_REQUEST_TIMEOUT: ANSWER_S}):
            show()
    except Exception as error:  # errors of Prefect and MLflow, which may be unavailable or busy
        logger.warning("%s is missing on the run's page: %s", what, error)
