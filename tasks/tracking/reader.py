"""What MLflow remembers of runs, read back: their names, tags, files and curves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.errors import InputError

FLOW_TAG, STAGE_TAG, PARENT_TAG = "r1flow.flow", "r1flow.stage", "mlflow.parentRunId"
FLOW_RUN_TAG = "r1flow.flow_run"
"""The id of the flow run in Prefect that a recipe run is of."""
KEY_TAG, STATUS_TAG, MADE_BY_TAG, ERROR_TAG = "r1flow.key", "r1flow.status", "r1flow.made_by_run", "r1flow.error"
DIGEST_TAG, FAILED_TAG, STALE_TAG = "r1flow.digest", "r1flow.failed", "r1flow.stale"
NOTE_TAG = "mlflow.note.content"
"""What MLflow shows as a run's description."""
_MOST = 10_000
_NEAR = 4


@dataclass(frozen=True)
class TrackedRun:
    """One run. Times are seconds since 1970; `ended` is None while it runs."""

    id: str
    name: str
    status: str  # RUNNING | FINISHED | FAILED | KILLED
    began: float
    ended: float | None
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last value of each

    @property
    def label(self) -> str:
        return f"{self.id[:8]} ({self.name})"


class Tracked:
    """Runs of one MLflow, by its MlflowClient; `or_stop` turns what fails there into an InputError."""

    def __init__(self, client: Any, or_stop: Callable[[Callable[[], Any]], Any]):
        self._client, self._or_stop = client, or_stop

    def newest_finished(self, recipe: str, tags: Mapping[str, str]) -> TrackedRun | None:
        """The newest run of a recipe that finished and has these tags."""
        return self._newest(recipe, ["attributes.status = 'FINISHED'", *with_tags(tags)])

    def newest(self, recipe: str, tags: Mapping[str, str]) -> TrackedRun | None:
        """The newest run of a recipe that has these tags, whatever became of it."""
        return self._newest(recipe, with_tags(tags))

    def _newest(self, recipe: str, conditions: Sequence[str]) -> TrackedRun | None:
        wanted = " and ".join(conditions)

        def search() -> TrackedRun | None:
            experiment = self._client.get_experiment_by_name(recipe)
            return next(iter(self._search([experiment.experiment_id], wanted, most=1)), None) if experiment else None

        found: TrackedRun | None = self._or_stop(search)
        return found

    def recipe_runs(self) -> list[TrackedRun]:
        """Every run of a recipe flow, newest first."""
        return self._or_stop(lambda: self._search(self._experiments(), f"tags.`{FLOW_TAG}` != ''"))

    def run(self, run_id: str) -> TrackedRun | None:
        """One run by its whole id, None if MLflow has it no more."""
        found = self._or_stop(lambda: self._search(self._experiments(), f"attributes.run_id = '{run_id}'", most=1))
        return found[0] if found else None

    def stage_runs(self, parent: str) -> list[TrackedRun]:
        """The runs of stages of one recipe run, in the order in which they began."""
        wanted = f"tags.`{PARENT_TAG}` = '{parent}' and tags.`{STAGE_TAG}` != ''"
        found: list[TrackedRun] = self._or_stop(lambda: self._search(self._experiments(), wanted))
        return found[::-1]

    def find(self, reference: str) -> TrackedRun:
        """The recipe run that a user means by its id, the beginning of it, `latest` or `latest~N`.

        Raises:
            InputError: for one that is unknown or ambiguous, with those that are near.
        """
        runs = self.recipe_runs()
        if not runs:
            raise InputError(f"run {reference!r}: MLflow has no recipe run yet; `r1 run tiny` makes the first")
        name, tilde, back = reference.partition("~")
        if name == "latest" and (not tilde or back.isdecimal()):
            number = int(back or 0)
            if number >= len(runs):
                raise InputError(
                    f"run {reference!r}: there are {len(runs)} recipe runs; the oldest is latest~{len(runs) - 1}"
                )
            return runs[number]
        matches = [run for run in runs if run.id.startswith(reference)] if reference else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(f"{run.id[: len(reference) + 4]} ({run.name})" for run in matches[:_NEAR])
            raise InputError(f"run {reference!r} stands for {len(matches)} recipe runs: {names}; give more characters")
        newest = ", ".join(run.label for run in runs[:_NEAR])
        raise InputError(f"run {reference!r}: no recipe run has an id that begins so; the newest are {newest}")

    def read_json(self, run_id: str, file: str) -> Any:
        """A JSON file of a run, None where it has no such file."""

        def read() -> Any:
            known = {entry.path for entry in self._client.list_artifacts(run_id)}
            if file not in known:
                return None
            with tempfile.TemporaryDirectory() as folder:
                return json.loads(Path(self._client.download_artifacts(run_id, file, folder)).read_text())

        return self._or_stop(read)

    def curve(self, run_id: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, by step; where a step was logged twice, the later value."""
        history = self._or_stop(lambda: self._client.get_metric_history(run_id, metric))
        return sorted({point.step: point.value for point in history}.items())

    def _search(self, experiments: Sequence[str], wanted: str, most: int = _MOST) -> list[TrackedRun]:
        found = self._client.search_runs(
            list(experiments), wanted, max_results=most, order_by=["attributes.start_time DESC"]
        )
        return [
            TrackedRun(
                id=run.info.run_id,
                name=run.info.run_name,
                status=run.info.status,
                began=run.info.start_time / 1000,
                # MLflow keeps the end of a run that was opened again.
                ended=run.info.end_time / 1000 if run.info.end_time and run.info.status != "RUNNING" else None,
                tags=run.data.tags,
                metrics=run.data.metrics,
            )
            for run in found
        ]

    def _experiments(self) -> list[str]:
        return [experiment.experiment_id for experiment in self._client.search_experiments()]


def with_tags(tags: Mapping[str, str]) -> list[str]:
    """Conditions of MLflow's search: runs that have all of these."""
    return [f"tags.`{name}` = '{value}'" for name, value in tags.items()]
