"""One run of a recipe, assembled from MLflow and the store: its stages, their status and their artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.store.manifest import Manifest
from tasks.store.store import Store
from tasks.tracking.client import RECIPE_FILE
from tasks.tracking.reader import RunReader, TrackedRun
from tasks.tracking.reuse import reuses
from tasks.tracking.tags import DIGEST_TAG, ERROR_TAG, KEY_TAG, MADE_BY_TAG, STAGE_TAG, STALE_TAG, STATUS_TAG


@dataclass(frozen=True)
class StageRun:
    """One stage of a recipe run. `manifest` is None if the stage made no artifact, or if it is no longer in the
    store."""

    name: str
    run: TrackedRun  # for a reused stage: the recipe's run, with the time of the reuse
    maker: TrackedRun  # the run that did the work: this one, or the earlier one whose artifact was reused
    manifest: Manifest | None

    @property
    def status(self) -> str:
        """One of ran, reused, failed, killed or running."""
        status = self.run.tags.get(STATUS_TAG, "running")
        return status if status != "running" or self.run.status == "RUNNING" else self.run.status.lower()

    @property
    def error(self) -> str:
        return self.run.tags.get(ERROR_TAG, "")

    @property
    def stale(self) -> str:
        """Why its artifact is stale (an input has been made again since); "" if it is not."""
        return self.maker.tags.get(STALE_TAG, "")

    @property
    def seconds(self) -> float | None:
        """Duration of the work, also for a reused stage. None if the work did not end."""
        if self.manifest is not None:
            return self.manifest.seconds
        return self.maker.ended - self.maker.began if self.maker.ended else None


@dataclass(frozen=True)
class RecipeRun:
    """A recipe run with its configuration and its stages, in the order in which they began."""

    run: TrackedRun
    config: Mapping[str, Any]
    stages: tuple[StageRun, ...]

    def stage(self, name: str) -> StageRun | None:
        """The last run of a stage: if it was retried, the retry."""
        return next((stage for stage in reversed(self.stages) if stage.name == name), None)

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Stage -> its artifact, if that exists."""
        return {stage.name: stage.manifest for stage in self.stages if stage.manifest is not None}


def _reused(run: TrackedRun) -> Iterator[TrackedRun]:
    """The stages that a recipe run reused, as runs without metric curves, because reused stages have no runs of their
    own."""
    for reuse in reuses(run.tags):
        tags = {
            STAGE_TAG: reuse.stage,
            STATUS_TAG: "reused",
            KEY_TAG: reuse.key,
            DIGEST_TAG: reuse.digest,
            MADE_BY_TAG: reuse.made_by,
        }
        yield TrackedRun(run.id, reuse.stage, "FINISHED", reuse.at, reuse.at, tags)


def load_run(reader: RunReader, store: Store, run: TrackedRun) -> RecipeRun:
    """A recipe run with everything that MLflow and the store know about it."""
    manifests: dict[str, dict[str | None, Manifest]] = {}  # digest -> MLflow run -> manifest
    for manifest in store.list():
        manifests.setdefault(manifest.digest, {})[manifest.mlflow_run_id] = manifest
    stages = []
    for stage_run in sorted([*reader.stage_runs(run.id), *_reused(run)], key=lambda stage: stage.began):
        made_by = stage_run.tags.get(MADE_BY_TAG)
        maker = (reader.run(made_by) if made_by else None) or stage_run
        # Attempts at a key that made the same have one digest. The run's own has the time that it took.
        attempts = manifests.get(stage_run.tags.get(DIGEST_TAG, ""), {})
        made = attempts.get(made_by or stage_run.id) or next(reversed(attempts.values()), None)
        stages.append(StageRun(stage_run.tags[STAGE_TAG], stage_run, maker, made))
    return RecipeRun(run, reader.read_json(run.id, RECIPE_FILE) or {}, tuple(stages))
