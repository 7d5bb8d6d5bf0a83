"""MLflow, the record of what happened: the only file that knows it.

One experiment a recipe, one parent run a recipe run, one child run a stage. A tracking store that cannot be reached
when a run begins stops the run; one that fails later costs a warning, and what it missed is sent again with the
next thing that is logged. A server that is restarted meanwhile is waited for. Importing MLflow takes a second, so
nothing here does it before the first call.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from grpo.errors import InputError
from grpo.processes.lifetime import process_name
from tasks.store.store import Manifest
from tasks.tracking.database import make_database
from tasks.tracking.names import alias_name, flatten, metric_name, registered_name
from tasks.tracking.outbox import Delivery, refused
from tasks.tracking.reader import DIGEST_TAG, PARENT_TAG, STAGE_TAG, Tracked, with_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

RECIPE_TAG, HOST_TAG, PROCESS_TAG = "r1flow.recipe", "r1flow.host", "r1flow.process"
RECIPE_FILE, CONFIG_FILE = "recipe.json", "config.json"
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_DATASET_DIGEST_LENGTH = 36
AWAY_S = 300.0
"""How long a server that was there is waited for, before a stage begins and before what it made is published."""
_AWAY_POLL_S = 2.0
_T = TypeVar("_T")
_Item = TypeVar("_Item")


def default_uri(home: Path) -> str:
    """A tracking store without a server, in the home folder."""
    return f"sqlite:///{home.resolve() / 'mlflow.db'}"


class Tracking:
    """The runs that this process records at `uri`: a server's address, or a `sqlite:///` file.

    Beside a sqlite file artifacts lie in `mlartifacts`; a server decides itself where they go.
    """

    def __init__(self, uri: str):
        self.uri = uri
        self._sqlite = Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None
        self._unsent: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        self._delivery = Delivery(uri)
        self._last_steps: dict[str, dict[str, int]] = {}
        # A dead server is noticed in seconds: its metrics wait here, and a trainer is being watched meanwhile.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results

    @functools.cached_property
    def _client(self) -> MlflowClient:
        import mlflow

        # They tell each step of making a database, and print the traceback of each error that is reported here anyway.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # of retries
        # Registering a model version looks its model up at the global address, whatever the client's is.
        mlflow.set_tracking_uri(self.uri)
        if self._sqlite:
            make_database(self._sqlite)
        return mlflow.MlflowClient(self.uri, self.uri)

    def open(self) -> None:
        """Load MLflow and its database now, for whoever has time; raises InputError if it cannot be reached."""
        self._or_stop(self._probe)

    @functools.cached_property
    def tracked(self) -> Tracked:
        """What is there already, to read."""
        return Tracked(self._client, self._or_stop)

    def page(self, run_id: str, file: str = "") -> str | None:
        """Where a browser finds a run, or a file of it, in MLflow's pages; None where there is no server."""
        if not self.uri.startswith(("http://", "https://")):
            return None
        run = self._or_stop(lambda: self._client.get_run(run_id))
        server = re.sub("(?<=//)[^/@]*@", "", self.uri).rstrip("/")  # a name and password stay here
        place = f"{server}/#/experiments/{run.info.experiment_id}/runs/{run_id}"
        return f"{place}/artifacts/{file}" if file else place

    # ---- runs: these fail loudly ----

    def recipe_run(self, recipe: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Begin the parent run of one run of a recipe, its whole configuration as the artifact recipe.json."""
        return self._start(recipe, name, config, tags, RECIPE_FILE)

    def stage_run(
        self, parent_run_id: str | None, recipe: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """Begin the run of one stage, its configuration as the artifact config.json."""
        parent = {PARENT_TAG: parent_run_id} if parent_run_id else {}
        patience_s = AWAY_S if parent_run_id else 0.0  # a parent's run shows that the server was there
        run_id = self._start(recipe, name, config, {**tags, **parent}, CONFIG_FILE, patience_s)
        # Who was killed while making this has left its run RUNNING.
        self._delivery.later("the end of runs whose process is gone", self._reconcile)
        return run_id

    def reopen(self, run_id: str) -> None:
        """Go on recording a run that another process began; steps that it logged already are not logged again."""

        def reopen() -> None:
            self._client.update_run(run_id, status="RUNNING")
            self._set_tags(run_id, _owner())

        self._or_stop(reopen)

    def has_stage_run(self, parent_run_id: str, stage: str, digest: str) -> bool:
        """Whether a recipe run has a run of this stage already that ended with this artifact."""
        tags = {PARENT_TAG: parent_run_id, STAGE_TAG: stage, DIGEST_TAG: digest}
        wanted = " and ".join(["attributes.status = 'FINISHED'", *with_tags(tags)])
        return bool(self._or_stop(lambda: self._client.search_runs(self._experiments(), wanted, max_results=1), AWAY_S))

    def reconcile(self) -> list[str]:
        """Mark as KILLED the runs that dead processes of this host left RUNNING; returns their ids."""
        return self._or_stop(self._reconcile)

    def _reconcile(self) -> list[str]:
        killed = []
        mine = " and ".join(["attributes.status = 'RUNNING'", *with_tags({HOST_TAG: socket.gethostname()})])
        for run in self._client.search_runs(self._experiments(), mine, max_results=10_000):
            pid, _, _ = run.data.tags.get(PROCESS_TAG, "").partition(" ")
            if pid.isdecimal() and run.data.tags[PROCESS_TAG] != process_name(int(pid)):
                self._client.set_terminated(run.info.run_id, "KILLED")
                killed.append(run.info.run_id)
        return killed

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

        def start() -> str:
            all_tags = {**_owner(), RECIPE_TAG: recipe, **tags}
            run_id: str = self._client.create_run(self._experiment(recipe), run_name=name, tags=all_tags).info.run_id
            for batch in _batches(flatten(config), _PARAMS_PER_BATCH):
                self._client.log_batch(run_id, params=[Param(key, value) for key, value in batch])
            self._client.log_text(run_id, json.dumps(config, indent=2, ensure_ascii=False), config_file)
            self._last_steps[run_id] = {}
            return run_id

        return self._or_stop(start, patience_s)

    def _experiment(self, recipe: str) -> str:
        from mlflow.exceptions import MlflowException

        if not (found := self._client.get_experiment_by_name(recipe)):
            location = None
            if self._sqlite:
                location = (self._sqlite.resolve().parent / "mlartifacts" / metric_name(recipe)).as_uri()
            try:
                return str(self._client.create_experiment(recipe, artifact_location=location))
            except MlflowException:  # another process created it meanwhile
                if not (found := self._client.get_experiment_by_name(recipe)):
                    raise
        if found.lifecycle_stage == "deleted":
            remedy = f"restore it with `mlflow experiments restore -x {found.experiment_id}`"
            raise InputError(f"the MLflow experiment {recipe!r} was deleted; {remedy}")
        return str(found.experiment_id)

    def _experiments(self) -> list[str]:
        return [experiment.experiment_id for experiment in self._client.search_experiments()]

    def ask(self, call: Callable[[MlflowClient], _T]) -> _T:
        """What MLflow knows, for those who have something else to ask it; raises InputError if it cannot be reached."""
        return self._or_stop(lambda: call(self._client))

    def _or_stop(self, call: Callable[[], _T], patience_s: float = 0.0) -> _T:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return call()
            except InputError:
                raise
            except Exception as error:  # the boundary to MLflow: sqlalchemy, requests and its own errors all come here
                if not refused(error) and not self._sqlite and time.monotonic() < deadline:
                    self._delivery.warn("the beginning of a run", error)
                    time.sleep(_AWAY_POLL_S)
                    continue
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                if "out-of-date database schema" in reason:
                    raise InputError(
                        f"MLflow's database {self.uri} has the schema of another version; copy it, then run `mlflow db "
                        f"upgrade {self.uri}`"
                    ) from error
                if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", reason):  # below six layers of "failed with"
                    reason = system[1]
                message = f"MLflow at {self.uri} failed: {reason[:300]}; start that server or give another tracking uri"
                raise InputError(message) from error

    def settle(self, run_id: str) -> None:
        """Wait until a server has recorded all that was logged so far.

        Raises:
            InputError: it has been away for too long; what it misses is still in the files that it was read from.
        """
        if not self._settled(run_id):
            raise InputError(
                f"MLflow at {self.uri} has been away for {AWAY_S / 60:g} minutes and misses what this stage logged; "
                "start it and give the same command: the stage continues where it is, and logs it again"
            )

    def _probe(self) -> None:
        self._client.search_experiments(max_results=1)

    def _settled(self, run_id: str) -> bool:
        """Whether a server has everything, waiting for one that is away. A database without one is not waited for."""
        deadline = time.monotonic() + AWAY_S
        while not self._sqlite and (self._unsent.get(run_id) or self._delivery.waiting):
            if self._delivery.now("the server", self._probe):
                self.log_metrics(run_id, [])
                self._delivery.retry()
            if time.monotonic() > deadline:
                return False
            time.sleep(_AWAY_POLL_S)
        return True

    # ---- what happens in a run: these warn, and what failed is tried again ----

    def log_metrics(self, run_id: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Log the numbers of each record at its "step". A step at or below a metric's last one is not logged again."""
        # What failed earlier goes first: a step after it would shut it out.
        unsent = self._unsent.setdefault(run_id, [])
        unsent.extend((int(time.time() * 1000), record) for record in records)

        def log() -> None:
            from mlflow.entities import Metric

            last = self._last(run_id)
            new: list[Metric] = []
            ahead: dict[str, int] = {}
            for now, record in unsent:
                step = int(record["step"])
                for name, value in record.items():
                    key = metric_name(name)
                    if (
                        name == "step"
                        or not isinstance(value, (int, float))
                        or step <= ahead.get(key, last.get(key, -1))
                    ):
                        continue
                    # MLflow stores an infinity as 1.8e308, beside which a chart shows nothing else.
                    new.append(Metric(key, math.nan if math.isinf(value) else float(value), now, step))
                    ahead[key] = step
            for batch in _batches(new, _METRICS_PER_BATCH):
                self._client.log_batch(run_id, metrics=batch)
                last.update((metric.key, metric.step) for metric in batch)

        if unsent and self._delivery.now("metrics", log):
            unsent.clear()
            self._delivery.retry()

    def log_dataset(self, run_id: str, manifest: Manifest, name: str, context: Literal["input", "output"]) -> None:
        """Link an artifact of data to the run by its digest; MLflow never opens it."""

        def log() -> None:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            dataset = Dataset(
                name=name,
                digest=manifest.digest[:_DATASET_DIGEST_LENGTH],
                source_type="local",
                source=json.dumps({"uri": str(manifest.path)}),
                profile=json.dumps({**manifest.counts, "sha256": manifest.digest}),
            )
            tags = {"mlflow.data.context": context, "sha256": manifest.digest, "stage": manifest.stage}
            entry = DatasetInput(dataset, [InputTag(key, value) for key, value in tags.items()])
            self._client.log_inputs(run_id, datasets=[entry])

        self._delivery.later(f"data set {name}", log)

    def log_model(self, run_id: str, manifest: Manifest, name: str, step: int) -> str | None:
        """Record a checkpoint as a model whose weights stay in the store; returns its id, None if it has to wait.

        It becomes a version of the registered model that has the recipe's name. The version does not download weights:
        its `uri` tag says where they are. Aliases are for `set_alias`.
        """
        ids: list[str] = []

        def log() -> None:
            from mlflow.entities import LoggedModelOutput

            run = self._client.get_run(run_id)
            tags = {"uri": str(manifest.path), "sha256": manifest.digest, "stage": manifest.stage}
            model = self._client.create_logged_model(
                run.info.experiment_id,
                name=re.sub(r"[/:.%\"']", "-", name),
                source_run_id=run_id,
                tags={"mlflow.model.isExternal": "true", **tags},
            )
            self._client.finalize_logged_model(model.model_id, "READY")
            ids.append(model.model_id)
            self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
            self._register(run.data.tags[RECIPE_TAG], run_id, model.model_id, tags)

        self._delivery.later(f"model {name}", log)
        return ids[0] if ids else None

    def _register(self, recipe: str, run_id: str | None, model_id: str, tags: dict[str, str]) -> str:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(registered_name(recipe))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model_id}"
        made = self._client.create_model_version(
            registered_name(recipe), source=source, run_id=run_id, tags=tags, model_id=model_id
        )
        return str(made.version)

    def set_alias(self, recipe: str, alias: str, manifest: Manifest) -> None:
        """Let `alias` of the recipe's registered model lead to this checkpoint."""
        self._delivery.later(f"alias {alias}", lambda: self._set_alias(recipe, alias, manifest))

    def set_alias_now(self, recipe: str, alias: str, manifest: Manifest) -> str:
        """The same for somebody who waits for it; returns the version, or raises InputError."""
        return self._or_stop(lambda: self._set_alias(recipe, alias, manifest))

    def _set_alias(self, recipe: str, alias: str, manifest: Manifest) -> str:
        """The newest version that has the artifact's digest; one is made if another recipe's run logged the model."""
        name, digest = registered_name(recipe), manifest.digest
        versions = self._client.search_model_versions(f"name = '{name}' and tags.sha256 = '{digest}'")
        if versions:
            version = str(max(int(found.version) for found in versions))
        elif (model_id := self.find_model(digest)) is not None:
            model = self._client.get_logged_model(model_id)
            tags = {tag: model.tags[tag] for tag in ("uri", "sha256", "stage")}
            version = self._register(recipe, model.source_run_id, model_id, tags)
        else:
            raise InputError(f"{manifest.stage} {manifest.key[:12]} is no model that MLflow at {self.uri} knows")
        self._client.set_registered_model_alias(name, alias_name(alias), version)
        return version

    def log_model_input(self, run_id: str, model_id: str) -> None:
        """Link the model that a run starts from, so that MLflow shows the lineage across stages."""

        def log() -> None:
            from mlflow.entities import LoggedModelInput

            self._client.log_inputs(run_id, models=[LoggedModelInput(model_id)])

        self._delivery.later("input model", log)

    def find_model(self, digest: str) -> str | None:
        """The newest model that was logged with this artifact's digest, in any experiment."""
        ids: list[str] = []

        def find() -> None:
            wanted = f"tags.sha256 = '{digest}'"
            models = self._client.search_logged_models(self._experiments(), filter_string=wanted, max_results=1)
            ids.extend(model.model_id for model in models)

        self._delivery.now("search for a model", find)
        return ids[0] if ids else None

    def log_table(self, run_id: str, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows (samples, say) as a table that the UI shows; what is nested is shown as JSON text."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {column: [_cell(row.get(column)) for row in rows] for column in columns}
        if rows:
            self._delivery.later(f"table {name}", lambda: self._client.log_table(run_id, table, f"{name}.json"))

    def log_file(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._delivery.later(f"file {path}", lambda: self._client.log_artifact(run_id, str(path), folder))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self._delivery.later(f"file {file}", lambda: self._client.log_text(run_id, text, file))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self._delivery.later("tags", lambda: self._set_tags(run_id, tags))

    def delete_tag(self, run_id: str, tag: str) -> None:
        self._delivery.later("a tag's removal", lambda: self._client.delete_tag(run_id, tag))

    def tagged(self, tag: str) -> dict[str, str]:
        """Run id -> value of this tag, of the runs of all experiments that have it; none if MLflow failed."""
        found: dict[str, str] = {}

        def search() -> None:
            runs = self._client.search_runs(self._experiments(), f"tags.`{tag}` LIKE '%'", max_results=10_000)
            found.update((run.info.run_id, run.data.tags[tag]) for run in runs)

        self._delivery.now("search for a tag", search)
        return found

    def finish(self, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        self.log_metrics(run_id, [])
        self._delivery.later(f"the end of run {run_id}", lambda: self._client.set_terminated(run_id, status))
        if status == "FINISHED":
            self._settled(run_id)
        missing = {waiting.what for waiting in self._delivery.waiting} | (
            {"metrics"} if self._unsent.pop(run_id, None) else set()
        )
        if missing:
            logger.warning("a run ended while MLflow at %s misses: %s", self.uri, ", ".join(sorted(missing)))

    def _set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def _last(self, run_id: str) -> dict[str, int]:
        if run_id not in self._last_steps:
            metrics = self._client.get_run(run_id).to_proto().data.metrics  # the newest value of each
            self._last_steps[run_id] = {metric.key: metric.step for metric in metrics}
        return self._last_steps[run_id]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False)


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    everything = list(items)
    return (everything[i : i + size] for i in range(0, len(everything), size))


def _owner() -> dict[str, str]:
    """Tags that tell later whether the process that records the run still lives."""
    return {HOST_TAG: socket.gethostname(), PROCESS_TAG: process_name(os.getpid()) or ""}
