"""Records runs in MLflow: one experiment per recipe, one parent run per recipe run, one child run per stage.

If the tracking store cannot be reached when a run begins, the run stops. If it fails later, a warning is logged, and
whatever it missed is sent again with the next call. If a server restarts in between, the run waits for it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo.errors import InputError
from grpo.processes.stop_request import signals_ignored
from grpo.secret_values import masked
from tasks.store.manifest import Manifest
from tasks.tracking import connection
from tasks.tracking.connection import Connection
from tasks.tracking.models.registry import ModelRegistry
from tasks.tracking.names import batches, dataset_digest, flatten, metric_name, table, write_table
from tasks.tracking.reader import RunReader, with_tags
from tasks.tracking.run_owner import (
    PROMPT_S,
    delete_repeats,
    end_runs_of_dead_processes,
    origin_tags,
    owner_tags,
)
from tasks.tracking.tags import (
    DATA_CONTEXT_TAG,
    DIGEST_TAG,
    ERROR_TAG,
    MODEL_STAGE_TAG,
    PARENT_TAG,
    RECIPE_TAG,
    SHA256_TAG,
    STAGE_TAG,
    START_TAG,
)

logger = logging.getLogger(__name__)

RECIPE_FILE, CONFIG_FILE = "recipe.json", "config.json"
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100


class Tracking(Connection):
    """The runs that this process records at `uri`: a server's address, or a `sqlite:///` file.

    With a sqlite file, artifacts are stored in `mlartifacts` next to it. A server decides where its artifacts go.
    """

    def __init__(self, uri: str, expected: bool = False):
        super().__init__(uri, expected)
        self._late: dict[str, str] = {}
        self._unsent: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        self._logged: dict[str, dict[str, dict[int, float]]] = {}  # run -> metric -> step -> the value that counts

    @functools.cached_property
    def reader(self) -> RunReader:
        """Reads back existing runs."""
        return RunReader(self)

    @functools.cached_property
    def models(self) -> ModelRegistry:
        """Checkpoints as models: their lineage, versions and aliases."""
        return ModelRegistry(self)

    # ---- runs: these fail loudly ----

    def recipe_run(self, recipe: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Begins the parent run of one recipe run, with the whole configuration as the artifact recipe.json."""
        return self._start(recipe, name, config, tags, RECIPE_FILE)

    def stage_run(
        self, parent_run_id: str | None, recipe: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """Begins the run of one stage, with its configuration as the artifact config.json."""
        parent = {PARENT_TAG: parent_run_id} if parent_run_id else {}
        patience_s = connection.MAX_AWAY_S if parent_run_id else 0.0  # with a parent run, the server was up before
        run_id = self._start(recipe, name, config, {**tags, **parent}, CONFIG_FILE, patience_s)
        # A process that was killed while it made the same artifact has left its run RUNNING.
        self.outbox.send("the end of runs whose process is gone", lambda: end_runs_of_dead_processes(self))
        return run_id

    def reopen(self, run_id: str) -> None:
        """Continues recording a run that another process began. Values that it has already logged are not logged
        again."""

        def reopen() -> None:
            self.client.update_run(run_id, status="RUNNING")
            self._set_tags(run_id, {**owner_tags(), **origin_tags()})

        self.or_stop(reopen)

    def has_stage_run(self, parent_run_id: str, stage: str, digest: str) -> bool:
        """Whether a recipe run already has a finished run of this stage with this artifact."""
        tags = {PARENT_TAG: parent_run_id, STAGE_TAG: stage, DIGEST_TAG: digest}
        condition = " and ".join(["attributes.status = 'FINISHED'", *with_tags(tags)])

        def search() -> bool:
            return bool(self.client.search_runs(self.experiments(), condition, max_results=1))

        return self.or_stop(search, connection.MAX_AWAY_S)

    def reconcile(self) -> list[str]:
        """Marks runs that dead processes of this host left RUNNING as KILLED. Returns their ids."""
        return self.or_stop(lambda: end_runs_of_dead_processes(self))

    def reconcile_now(self) -> None:
        """Like `reconcile`, but does not wait for an unavailable server: a later run does it."""
        self.outbox.try_now("a search for runs of dead processes", lambda: end_runs_of_dead_processes(self))

    def _start(
        self,
        recipe: str,
        name: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str],
        config_file: str,
        patience_s: float = 0.0,
    ) -> str:
        from mlflow.entities import Param

        began, token = time.monotonic(), uuid.uuid4().hex

        def start() -> str:
            all_tags = {**owner_tags(), **origin_tags(), RECIPE_TAG: recipe, START_TAG: token, **tags}
            run_id: str = self.client.create_run(self.experiment(recipe), run_name=name, tags=all_tags).info.run_id
            if time.monotonic() - began > PROMPT_S:
                self._late[run_id] = token
                delete_repeats(self, token, run_id)
            for batch in batches(flatten(config), _PARAMS_PER_BATCH):
                self.client.log_batch(run_id, params=[Param(key, value) for key, value in batch])
            self.client.log_text(run_id, json.dumps(config, indent=2, ensure_ascii=False), config_file)
            self._logged[run_id] = {}
            return run_id

        return self.or_stop(start, patience_s)

    def settle(self, run_id: str) -> None:
        """Waits until the server has recorded everything that was logged so far.

        Raises:
            InputError: it was unavailable too long. The missing metrics are still in the files they were read from.
        """
        if not self.sqlite and not self._settled(run_id):
            raise InputError(
                f"MLflow at {self.uri} has been away for {connection.MAX_AWAY_S / 60:g} minutes and misses what this "
                "stage logged; start it and give the same command: the stage continues where it is, and logs it again"
            )

    def _settled(self, run_id: str) -> bool:
        """Waits for an unavailable server, or a file that cannot be written. Returns whether it has everything."""
        deadline = time.monotonic() + (connection.MAX_LOCKED_S if self.sqlite else connection.MAX_AWAY_S)
        while self._unsent.get(run_id) or self.outbox.pending:
            if self.outbox.try_now("the server", self.probe):
                self.log_metrics(run_id, [])
                self.outbox.retry()
            if time.monotonic() > deadline:
                return False
            time.sleep(connection.AWAY_POLL_S)
        return True

    # ---- events in a run: these warn, and a failed call is tried again ----

    def log_metrics(self, run_id: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Logs the numbers of each record at its "step". If a step is done again, as after a rollback, values that
        differ are logged again; the later value counts."""
        # Records that failed earlier go first, so that the later value of a step is the newer one.
        unsent = self._unsent.setdefault(run_id, [])
        unsent.extend((int(time.time() * 1000), record) for record in records)

        def log() -> None:
            from mlflow.entities import Metric

            logged = self._values(run_id)
            new: list[Metric] = []
            new_values: dict[tuple[str, int], float] = {}
            for now, record in unsent:
                step = int(record["step"])
                for name, value in record.items():
                    if name == "step" or not isinstance(value, (int, float)):
                        continue
                    # MLflow stores an infinity as 1.8e308, which hides everything else in a chart.
                    key, number = metric_name(name), math.nan if math.isinf(value) else float(value)
                    if not _same(new_values.get((key, step), logged.get(key, {}).get(step)), number):
                        new.append(Metric(key, number, now, step))
                        new_values[key, step] = number
            for batch in batches(new, _METRICS_PER_BATCH):
                self.client.log_batch(run_id, metrics=batch)
                for metric in batch:
                    logged.setdefault(metric.key, {})[metric.step] = metric.value

        if unsent and self.outbox.try_now("metrics", log):
            unsent.clear()
            self.outbox.retry()

    def metric_names(self, run_id: str) -> set[str]:
        """Names, as in MLflow, of the metrics that this process has logged to a run that it began."""
        return set(self._logged.get(run_id, {}))

    def log_dataset(self, run_id: str, manifest: Manifest, name: str, context: Literal["input", "output"]) -> None:
        """Links a data artifact to the run by its digest. MLflow never opens it."""

        def log() -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            dataset = Dataset(
                name=name,
                digest=dataset_digest(manifest.digest),
                source_type="local",
                source=json.dumps({"uri": manifest.location}),
                profile=json.dumps({**manifest.counts, "sha256": manifest.digest}),
            )
            tags = {DATA_CONTEXT_TAG: context, SHA256_TAG: manifest.digest, MODEL_STAGE_TAG: manifest.stage}
            entry = DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])
            self.client.log_inputs(run_id, datasets=[entry])

        self.outbox.send(f"data set {name}", log)

    def log_table(self, run_id: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs rows, such as samples, as a table in the UI, in place of an earlier one of that name. Nested values
        become JSON text, and numbers that are not finite are empty."""
        text = table(rows)
        if rows:
            self.outbox.send(f"table {name}", lambda: write_table(self.client, run_id, f"{name}.json", text))

    def log_file(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self.outbox.send(f"file {path}", lambda: self.client.log_artifact(run_id, str(path), folder))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.outbox.send(f"file {file}", lambda: self.client.log_text(run_id, text, file))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.outbox.send("tags", lambda: self._set_tags(run_id, tags))

    def delete_tag(self, run_id: str, tag: str) -> None:
        self.outbox.send("tags", lambda: self.client.delete_tag(run_id, tag))

    def tagged(self, tag: str) -> dict[str, str]:
        """Run id -> value of this tag, for all runs that have it. Empty if MLflow failed."""
        values: dict[str, str] = {}

        def search() -> None:
            runs = self.client.search_runs(self.experiments(), f"tags.`{tag}` LIKE '%'", max_results=10_000)
            values.update((run.info.run_id, run.data.tags[tag]) for run in runs)

        self.outbox.try_now("search for a tag", search)
        return values

    def fail(self, run_id: str, error: BaseException, tags: Mapping[str, str]) -> None:
        """Closes a run that ended with an error: as FAILED, or as KILLED if it was stopped. A second signal cannot
        interrupt this."""
        with signals_ignored():
            self.set_tags(run_id, {**tags, ERROR_TAG: masked(str(error))[:500]})
            self.finish(run_id, "FAILED" if isinstance(error, Exception) else "KILLED")

    def finish(self, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends a run. Raises InputError if one that succeeded cannot be ended: a later run would take it for killed."""
        self.log_metrics(run_id, [])
        end = f"the end of run {run_id}"
        self.outbox.send(end, lambda: self.client.set_terminated(run_id, status), needed=True)
        if token := self._late.pop(run_id, None):  # duplicates that began after the run
            self.outbox.send("the end of repeated runs", lambda: delete_repeats(self, token, run_id))
        if status == "FINISHED":
            self._settled(run_id)
        unsent = ["metrics"] if self._unsent.pop(run_id, None) else []
        missing = sorted({*unsent, *(entry.what for entry in self.outbox.pending)})
        said = f"MLflow at {masked(self.uri)} misses: {', '.join(missing)}"
        if status == "FINISHED" and end in missing:
            raise InputError(f"{said}; see that it can be written, and give the same command: it uses what was made")
        if missing:
            logger.warning("a run has ended; %s", said)

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def _values(self, run_id: str) -> dict[str, dict[int, float]]:
        if run_id not in self._logged:  # another process began it
            names = self.client.get_run(run_id).data.metrics
            curves = {name: self.client.get_metric_history(run_id, name) for name in names}
            self._logged[run_id] = {name: {p.step: p.value for p in points} for name, points in curves.items()}
        return self._logged[run_id]


def _same(before: float | None, value: float) -> bool:
    return before is not None and (before == value or (math.isnan(before) and math.isnan(value)))
