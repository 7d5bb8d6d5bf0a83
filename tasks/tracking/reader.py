"""Reads runs back from MLflow: names, tags, files and metric curves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from tasks.tracking.connection import Connection
from tasks.tracking.tags import FLOW_TAG, PARENT_TAG, STAGE_TAG, is_waiting

_MAX_RUNS = 10_000
_MAX_SHOWN = 4


@dataclass(frozen=True)
class TrackedRun:
    """One run. Times are seconds since 1970; `ended` is None while the run is in progress."""

    id: str
    name: str
    status: str  # RUNNING | FINISHED | FAILED | KILLED | WAITING (for an answer to a gate)
    began: float
    ended: float | None
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last value of each metric

    @property
    def label(self) -> str:
        return f"{self.id[:8]} ({self.name})"


class RunReader:
    """The runs of one MLflow. Every method raises InputError if MLflow cannot be reached."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def newest(self, recipe: str, tags: Mapping[str, str]) -> TrackedRun | None:
        """The newest run of a recipe with these tags, whatever its status."""
        condition = " and ".join(with_tags(tags))

        def search() -> TrackedRun | None:
            experiment = self._connection.client.get_experiment_by_name(recipe)
            return (
                next(iter(self._search([experiment.experiment_id], condition, limit=1)), None) if experiment else None
            )

        return self._connection.or_stop(search)

    def recipe_runs(self) -> list[TrackedRun]:
        """All recipe runs, newest first."""
        return self._connection.or_stop(
            lambda: self._search(self._connection.experiments(), f"tags.`{FLOW_TAG}` != ''")
        )

    def run(self, run_id: str) -> TrackedRun | None:
        """One run by its full id; None if MLflow no longer has it."""
        runs = self._connection.or_stop(
            lambda: self._search(self._connection.experiments(), f"attributes.run_id = '{run_id}'", limit=1)
        )
        return runs[0] if runs else None

    def stage_runs(self, parent: str) -> list[TrackedRun]:
        """The stage runs of one recipe run, oldest first."""
        condition = f"tags.`{PARENT_TAG}` = '{parent}' and tags.`{STAGE_TAG}` != ''"
        return self._connection.or_stop(lambda: self._search(self._connection.experiments(), condition))[::-1]

    def find(self, reference: str) -> TrackedRun:
        """The recipe run with this id (or id prefix), `latest` or `latest~N`.

        Raises:
            InputError: the reference is unknown or ambiguous; the message lists the candidates.
        """
        runs = self.recipe_runs()
        if not runs:
            raise InputError(f"run {reference!r}: MLflow has no recipe run yet; `r1 run tiny` makes the first")
        name, tilde, back = reference.partition("~")
        if name == "latest" and (not tilde or back.isdecimal()):
            number = int(back or 0) if len(back) < 10 else len(runs)  # Python reads no number of thousands of digits
            if number >= len(runs):
                raise InputError(
                    f"run {reference[:40]!r}: there are {len(runs)} recipe runs; the oldest is latest~{len(runs) - 1}"
                )
            return runs[number]
        matches = [run for run in runs if run.id.startswith(reference)] if reference else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(f"{run.id[: len(reference) + 4]} ({run.name})" for run in matches[:_MAX_SHOWN])
            raise InputError(f"run {reference!r} stands for {len(matches)} recipe runs: {names}; give more characters")
        newest = ", ".join(run.label for run in runs[:_MAX_SHOWN])
        raise InputError(f"run {reference!r}: no recipe run has an id that begins so; the newest are {newest}")

    def read_json(self, run_id: str, file: str) -> Any:
        """The contents of a JSON file of a run; None if it has no such file."""

        def read() -> Any:
            paths = {entry.path for entry in self._connection.client.list_artifacts(run_id)}
            if file not in paths:
                return None
            with tempfile.TemporaryDirectory() as folder:
                return json.loads(Path(self._connection.client.download_artifacts(run_id, file, folder)).read_text())

        return self._connection.or_stop(read)

    def curve(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) pairs of a metric, sorted by step. If a step was logged twice, the later value counts."""
        history = self._connection.or_stop(lambda: self._connection.client.get_metric_history(run_id, metric))
        return sorted({point.step: point.value for point in history}.items())

    def _search(self, experiments: Sequence[str], condition: str, limit: int = _MAX_RUNS) -> list[TrackedRun]:
        runs = self._connection.client.search_runs(
            list(experiments), condition, max_results=limit, order_by=["attributes.start_time DESC"]
        )
        return [
            TrackedRun(
                id=run.info.run_id,
                name=run.info.run_name,
                status="WAITING" if is_waiting(run.data.tags) else run.info.status,
                began=run.info.start_time / 1000,
                # MLflow keeps the end time of a run that was reopened.
                ended=run.info.end_time / 1000 if run.info.end_time and run.info.status != "RUNNING" else None,
                tags=run.data.tags,
                metrics=run.data.metrics,
            )
            for run in runs
        ]


def with_tags(tags: Mapping[str, str]) -> list[str]:
    """Conditions in MLflow's search syntax for runs that have all of these tags."""
    return [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
