"""The artifacts of an MLflow run, and the recipe run that produced an artifact."""

from __future__ import annotations

import re
from typing import Any

from grpo.errors import InputError
from tasks.store.manifest import Manifest
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.reuse import reuses
from tasks.tracking.tags import DIGEST_TAG, FLOW_TAG, OVERRIDES_TAG, PARENT_TAG, RECIPE_TAG, SEED_TAG


def artifact_of(run: str, stage: str, tracking: Tracking, store: Store) -> Manifest:
    """The artifact of `stage` that a recipe run, or a run of one stage, made, reused or read.

    `run` is its MLflow id, or at least the first 6 characters. The run's own artifacts are searched first, then their
    inputs, then the inputs of those.

    Raises:
        InputError: the run does not exist, or has none or several artifacts of the stage.
    """
    by_digest = {manifest.digest: manifest for manifest in store.list()}
    level = {digest: by_digest[digest] for digest in _digests(run, tracking) if digest in by_digest}
    seen: set[str] = set()
    stages: set[str] = set()
    while level:
        matches = [manifest for manifest in level.values() if manifest.stage == stage]
        if len(matches) > 1:
            keys = ", ".join(manifest.key[:12] for manifest in matches)
            raise InputError(f"{run}:{stage}: the run has several artifacts of this stage ({keys}); give one of these")
        if matches:
            return matches[0]
        seen |= level.keys()
        stages |= {manifest.stage for manifest in level.values()}
        inputs = [ref.digest for manifest in level.values() for ref in manifest.inputs.values()]
        level = {digest: by_digest[digest] for digest in inputs if digest in by_digest and digest not in seen}
    names = ", ".join(sorted(stages)) or "nothing that is still in the store"
    raise InputError(f"{run}:{stage}: the run has no artifact of stage {stage!r}; it has {names}")


def _digests(run: str, tracking: Tracking) -> list[str]:
    """Digests of the artifacts of a run, of its child runs and of the stages that it reused."""
    if not re.fullmatch("[0-9a-f]{6,32}", run):
        raise InputError(f"{run!r} is no MLflow run; give 6 or more characters of its id, as MLflow's UI shows it")

    def query(client: Any) -> list[str]:
        experiments = tracking.experiments()
        matches = client.search_runs(experiments, f"attributes.run_id LIKE '{run}%'", max_results=3)
        if not matches:
            raise InputError(f"{run}: MLflow at {tracking.uri} has no run whose id begins so")
        if len(matches) > 1:
            ids = ", ".join(match.info.run_id for match in matches)
            raise InputError(f"{run}: begins the ids of several runs ({ids}); give more characters")
        children = client.search_runs(experiments, f"tags.`{PARENT_TAG}` = '{matches[0].info.run_id}'")
        reused = [reuse.digest for reuse in reuses(matches[0].data.tags)]
        return [r.data.tags[DIGEST_TAG] for r in [*matches, *children] if DIGEST_TAG in r.data.tags] + reused

    return tracking.ask(query)


def provenance(run_id: str | None, tracking: Tracking) -> dict[str, str]:
    """Values for "recipe", "flow", "overrides" and "seed" of the recipe run that a stage's run belongs to, as far as
    MLflow has them. Empty if this MLflow does not have the run."""
    names = {"recipe": RECIPE_TAG, "flow": FLOW_TAG, "overrides": OVERRIDES_TAG, "seed": SEED_TAG}

    def query(client: Any) -> dict[str, str]:
        tags = client.get_run(run_id).data.tags
        if parent := tags.get(PARENT_TAG):
            tags = client.get_run(parent).data.tags
        return {name: tags[tag] for name, tag in names.items() if tag in tags}

    try:
        return tracking.ask(query) if run_id else {}
    except InputError:
        return {}
