"""MLflow's model registry: one registered model per recipe, one version per checkpoint, and aliases for some versions.

An alias points to a version, and the version's tag `sha256` identifies the artifact in the store. `models:/` loads the
same weights; see tasks/tracking/models/files.py.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grpo.errors import InputError
from tasks.store.manifest import Manifest
from tasks.store.store import Store
from tasks.tracking.connection import Connection, every_result
from tasks.tracking.models.files import local_folder, remove_model, write_model
from tasks.tracking.names import alias_name, dataset_digest, metric_name, registered_name
from tasks.tracking.tags import EXTERNAL_TAG, MODEL_STAGE_TAG, RECIPE_TAG, SHA256_TAG, URI_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

CHAMPION = "champion"


class ModelRegistry:
    """The checkpoints registered as models in one MLflow. Obtained from `Tracking.models`."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def _client(self) -> MlflowClient:
        return self._connection.client

    # ---- while a run is recorded: these warn, and a failed call is tried again ----

    def log(self, run_id: str, manifest: Manifest, name: str, step: int) -> str | None:
        """Records a checkpoint as a model that MLflow can load. Returns its id, or None if recording has to wait.

        It becomes a version of the registered model that has the recipe's name. Its `uri` tag is the artifact's folder
        in the store. `set_alias` sets aliases.
        """
        ids: list[str] = []

        def log() -> None:
            from mlflow.entities import LoggedModelOutput

            run = self._client.get_run(run_id)
            tags = {URI_TAG: manifest.location, SHA256_TAG: manifest.digest, MODEL_STAGE_TAG: manifest.stage}
            model = self._client.create_logged_model(
                run.info.experiment_id,
                name=re.sub(r"[/:.%\"']", "-", name),
                source_run_id=run_id,
                tags={EXTERNAL_TAG: "true", **tags},
            )
            self._package(model, manifest)
            self._client.finalize_logged_model(model.model_id, "READY")
            ids.append(model.model_id)
            self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
            self._register(run.data.tags[RECIPE_TAG], run_id, model.model_id, tags)

        self._connection.outbox.send(f"model {name}", log)
        return ids[0] if ids else None

    def log_input(self, run_id: str, model_id: str) -> None:
        """Links the model that a run starts from, so that MLflow shows the lineage across stages."""

        def log() -> None:
            from mlflow.entities import LoggedModelInput

            self._client.log_inputs(run_id, models=[LoggedModelInput(model_id)])

        self._connection.outbox.send("input model", log)

    def log_output(self, run_id: str, model_id: str, step: int) -> None:
        """Links a model to a run other than the one that made it, such as the recipe run."""

        def log() -> None:
            from mlflow.entities import LoggedModelOutput

            self._client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])

        self._connection.outbox.send("output model", log)

    def log_scores(
        self, run_id: str, checkpoint: Manifest, step: int, scores: Mapping[str, float], data: str, problems: Manifest
    ) -> None:
        """Logs metrics of a checkpoint to its model, with the data set `data` that they were measured on, and to the
        run that measured them."""

        def log() -> None:
            from mlflow.entities import Metric

            now, model_id = int(time.time() * 1000), self.find(checkpoint.digest)
            digest = dataset_digest(problems.digest)
            metrics = [
                Metric(metric_name(name), value, now, step, model_id, data, digest)
                for name, value in scores.items()
                if math.isfinite(value)
            ]
            self._client.log_batch(run_id, metrics=metrics)

        self._connection.outbox.send(f"scores of {checkpoint.stage}", log)

    def find(self, digest: str) -> str | None:
        """The id of the newest model that was logged with this artifact's digest, in any experiment."""
        ids: list[str] = []

        def search() -> None:
            condition = f"tags.{SHA256_TAG} = '{digest}'"
            models = self._client.search_logged_models(
                self._connection.experiments(), filter_string=condition, max_results=1
            )
            ids.extend(model.model_id for model in models)

        self._connection.outbox.try_now("search for a model", search)
        return ids[0] if ids else None

    def set_alias(self, recipe: str, alias: str, manifest: Manifest) -> None:
        """Points `alias` of the recipe's registered model at this checkpoint."""
        self._connection.outbox.send(f"alias {alias}", lambda: self._set_alias(recipe, alias, manifest))

    # ---- for a user who waits for the answer: these raise InputError ----

    def set_alias_now(self, recipe: str, alias: str, manifest: Manifest) -> str:
        """Points `alias` of the recipe's registered model at this checkpoint. Returns the version."""
        return self._connection.or_stop(lambda: self._set_alias(recipe, alias, manifest))

    def by_alias(self, alias: str, recipe: str | None, store: Store) -> Manifest:
        """The checkpoint that `alias` of a recipe's registered model points to.

        Raises:
            InputError: no recipe has this alias, several have it and `recipe` is None, or its artifact is gone.
        """
        versions = self._connection.ask(lambda client: _versions(client, alias_name(alias)))
        if recipe is not None:
            versions = {name: version for name, version in versions.items() if name == registered_name(recipe)}
        shown = f"{alias}@{recipe}" if recipe else alias
        if not versions:
            raise InputError(f"{shown}: no registered model has this alias; `r1 promote REF --alias {alias}` sets it")
        if len(versions) > 1:
            choices = " or ".join(f"{alias}@{name}" for name in versions)
            raise InputError(f"{alias}: {len(versions)} recipes have it; write {choices}")
        tags = next(iter(versions.values())).tags
        manifest = next((m for m in reversed(store.list()) if m.digest == tags[SHA256_TAG]), None)
        if manifest is None:
            raise InputError(f"{shown}: its artifact is not in {store.backend.place}; it was made as {tags[URI_TAG]}")
        return manifest

    def recipes_with(self, manifest: Manifest) -> list[str]:
        """The registered models that have this checkpoint as a version."""

        def search(client: Any) -> list[str]:
            versions = client.search_model_versions(f"tags.{SHA256_TAG} = '{manifest.digest}'")
            return sorted({version.name for version in versions})

        return self._connection.ask(search)

    def remove_files(self, manifest: Manifest) -> None:
        """Removes MLflow's hard links to an artifact's files, once the artifact is gone from the store."""

        def remove() -> None:
            condition = f"tags.{SHA256_TAG} = '{manifest.digest}'"
            experiments = self._connection.experiments()
            for model in every_result(self._client.search_logged_models, experiments, filter_string=condition):
                if (folder := local_folder(model.artifact_location)) is not None and folder.is_dir():
                    remove_model(folder)
                    self._client.set_logged_model_tags(model.model_id, {EXTERNAL_TAG: "true"})

        self._connection.outbox.send(f"the removal of {manifest.stage} {manifest.key[:12]}", remove)

    def _package(self, model: LoggedModel, manifest: Manifest) -> None:
        """Makes a model loadable if its artifact can be hard-linked from MLflow's artifacts."""
        folder = local_folder(model.artifact_location)
        if folder is not None and write_model(folder, manifest, model.model_id, model.source_run_id):
            self._client.set_logged_model_tags(model.model_id, {EXTERNAL_TAG: "false"})

    def _register(self, recipe: str, run_id: str | None, model_id: str, tags: dict[str, str]) -> str:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(registered_name(recipe))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self._client.create_model_version(
            registered_name(recipe), source=f"models:/{model_id}", run_id=run_id, tags=tags, model_id=model_id
        )
        return str(version.version)

    def _set_alias(self, recipe: str, alias: str, manifest: Manifest) -> str:
        """Points the alias at the newest version that has the artifact's digest. If only another recipe's run logged
        the model, first creates a version of it for this recipe."""
        name, digest = registered_name(recipe), manifest.digest
        versions = self._client.search_model_versions(f"name = '{name}' and tags.{SHA256_TAG} = '{digest}'")
        if versions:
            newest = max(versions, key=lambda entry: int(entry.version))
            version = str(newest.version)
            # Search results leave `model_id` empty.
            self._package(self._client.get_logged_model(str(newest.source).removeprefix("models:/")), manifest)
        elif (model_id := self.find(digest)) is not None:
            model = self._client.get_logged_model(model_id)
            tags = {tag: model.tags[tag] for tag in (URI_TAG, SHA256_TAG, MODEL_STAGE_TAG)}
            version = self._register(recipe, model.source_run_id, model_id, tags)
        else:
            uri = self._connection.uri
            raise InputError(f"{manifest.stage} {manifest.key[:12]} is no model that MLflow at {uri} knows")
        self._client.set_registered_model_alias(name, alias_name(alias), version)
        return version


def _versions(client: Any, alias: str) -> dict[str, Any]:
    """Registered model -> its version that has this alias."""
    models = [model for model in every_result(client.search_registered_models) if alias in model.aliases]
    return {model.name: client.get_model_version_by_alias(model.name, alias) for model in models}
