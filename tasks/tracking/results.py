"""Logs the final numbers of a stage to MLflow.

MLflow draws a metric as a bar if it has only step 0, and any other single value as a dot on axes. Metrics without a
slash in their names are shown together, below all groups that are formed by slashes; charts of a group are sorted by
name, curves and bars alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.store.manifest import Manifest
from tasks.tracking.client import Tracking
from tasks.tracking.names import metric_name
from tasks.tracking.tags import NOTE_TAG

_CELL_LENGTH = 4000
_COLUMNS = {"problem": "prompt", **{name: name for name in ("step", "gold", "completion", "reward", "advantage")}}
_NOTE_LENGTH = 5000  # MLflow refuses tags of more than 8000 characters


def log_results(
    record: Tracking, run_id: str, manifest: Manifest, checkpoints: Mapping[str, str], description: str
) -> None:
    """Logs the numbers of an artifact as bars, and `description` (Markdown) as the run's description.

    Metrics that have a curve in the run are left out. `checkpoints`: input -> name of an evaluated checkpoint, whose
    numbers `dev2/pass@1` are grouped by metric: `pass_at_1/dev2`.
    """
    curves = record.metric_names(run_id)
    bars = {}
    for name, value in manifest.metrics.items():
        checkpoint, _, metric = name.partition("/")
        shown = of_checkpoint(metric, checkpoint) if checkpoint in checkpoints.values() else name.replace("/", "_")
        if value is not None and metric_name(name) not in curves:
            bars[shown] = value
    record.log_metrics(run_id, [{"step": 0, **bars}])
    if 0 < len(description) <= _NOTE_LENGTH:
        record.set_tags(run_id, {NOTE_TAG: description})


def log_scores(
    record: Tracking,
    run_id: str,
    manifest: Manifest,
    checkpoints: Mapping[str, str],
    inputs: Mapping[str, Manifest],
    data: str,
) -> None:
    """Logs evaluation results to the models that were evaluated, with the data set of the input `data`, so that
    `search_logged_models` can rank them by `metrics.pass_at_1`. The run gets a curve over its checkpoints, in order."""
    for step, (stage, checkpoint) in enumerate(checkpoints.items()):
        prefix = f"{checkpoint}/"
        scores = {
            name.removeprefix(prefix): value
            for name, value in manifest.metrics.items()
            if name.startswith(prefix) and value is not None
        }
        if stage in inputs and data in inputs:
            record.models.log_scores(run_id, inputs[stage], step, scores, data, inputs[data])


class CompletionsTable:
    """A policy's completions during training, as a table of its run that can be read while it trains.

    Rows are those of the trainer's completions.jsonl. Rewards become columns reward_NAME, and long texts are truncated.
    """

    def __init__(self, record: Tracking, run_id: str, name: str):
        self._record, self._run_id, self._name = record, run_id, name
        self._rows: list[dict[str, Any]] = []

    def add(self, rows: Sequence[Mapping[str, Any]], anew: bool = False) -> None:
        """Adds rows and logs the whole table again. `anew`: first drops all rows, because these are all that the
        trainer's file has; a trainer that goes back to a checkpoint drops later ones, and samples those steps again."""
        if anew:
            self._rows = []
        for row in rows:
            cells = {_COLUMNS.get(key, f"reward_{key}"): value for key, value in row.items() if key != "of"}
            self._rows.append({k: v[:_CELL_LENGTH] if isinstance(v, str) else v for k, v in cells.items()})
        if rows:
            self._record.log_table(self._run_id, self._name, self._rows)


def of_checkpoint(metric: str, checkpoint: str) -> str:
    """Name of a checkpoint's metric in MLflow, grouped by metric: "pass@1/dev2"."""
    return f"{metric}/{checkpoint}"
