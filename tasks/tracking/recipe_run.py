"""One run of a recipe as MLflow and the store know it together: its stages, how they went, and what they made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.store.store import Manifest, Store
from tasks.tracking.client import RECIPE_FILE
from tasks.tracking.reader import (
    DIGEST_TAG,
    ERROR_TAG,
    MADE_BY_TAG,
    STAGE_TAG,
    STALE_TAG,
    STATUS_TAG,
    Tracked,
    TrackedRun,
)


@dataclass(frozen=True)
class StageRun:
    """One stage in it. `manifest` is None where it made nothing, or where that is no longer in the store."""

    name: str
    run: TrackedRun
    maker: TrackedRun  # the run that did the work: this one, or the earlier one whose artifact was reused
    manifest: Manifest | None

    @property
    def status(self) -> str:
        """ran | reused | failed | killed | running"""
        said = self.run.tags.get(STATUS_TAG, "running")
        return said if said != "running" or self.run.status == "RUNNING" else self.run.status.lower()

    @property
    def error(self) -> str:
        return self.run.tags.get(ERROR_TAG, "")

    @property
    def stale(self) -> str:
        """Why what it made is out of date, "" if it is not: an input has been made again since."""
        return self.maker.tags.get(STALE_TAG, "")

    @property
    def seconds(self) -> float | None:
        """What the work took, also where it was reused; None if it did not end."""
        if self.manifest is not None:
            return self.manifest.seconds
        return self.maker.ended - self.maker.began if self.maker.ended else None


@dataclass(frozen=True)
class RecipeRun:
    run: TrackedRun
    config: Mapping[str, Any]
    stages: tuple[StageRun, ...]

    def stage(self, name: str) -> StageRun | None:
        """The last run of a stage: a retry comes after what failed."""
        return next((stage for stage in reversed(self.stages) if stage.name == name), None)

    @property
    def manifests(self) -> dict[str, Manifest]:
        """Stage -> what it made, of those whose artifact exists."""
        return {stage.name: stage.manifest for stage in self.stages if stage.manifest is not None}


def load_run(tracked: Tracked, store: Store, run: TrackedRun) -> RecipeRun:
    """All that is known of a recipe run."""
    known = {manifest.digest: manifest for manifest in store.list()}
    stages = []
    for found in tracked.stage_runs(run.id):
        made_by = found.tags.get(MADE_BY_TAG)
        maker = (tracked.run(made_by) if made_by else None) or found
        stages.append(StageRun(found.tags[STAGE_TAG], found, maker, known.get(found.tags.get(DIGEST_TAG, ""))))
    return RecipeRun(run, tracked.read_json(run.id, RECIPE_FILE) or {}, tuple(stages))
