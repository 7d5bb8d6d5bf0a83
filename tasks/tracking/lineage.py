"""What a run in MLflow made or reused, found again by the run's id."""

from __future__ import annotations

import re
from typing import Any

from grpo.errors import InputError
from tasks.store.store import Manifest, Store
from tasks.tracking.client import Tracking


def artifact_of(run: str, stage: str, tracking: Tracking, store: Store) -> Manifest:
    """The artifact of `stage` that a recipe run, or a run of one stage, made, reused or read.

    `run` is its MLflow id or 6 or more of its first characters. Inputs are looked through from the near to the far.

    Raises:
        InputError: for a run that does not exist, or has to do with no or with several artifacts of the stage.
    """
    known = {manifest.digest: manifest for manifest in store.list()}
    near = {digest: known[digest] for digest in _digests(run, tracking) if digest in known}
    seen: set[str] = set()
    stages: set[str] = set()
    while near:
        found = [manifest for manifest in near.values() if manifest.stage == stage]
        if len(found) > 1:
            keys = ", ".join(manifest.key[:12] for manifest in found)
            raise InputError(f"{run}:{stage}: the run has several artifacts of this stage ({keys}); give one of these")
        if found:
            return found[0]
        seen |= near.keys()
        stages |= {manifest.stage for manifest in near.values()}
        inputs = [ref.digest for manifest in near.values() for ref in manifest.inputs.values()]
        near = {digest: known[digest] for digest in inputs if digest in known and digest not in seen}
    has = ", ".join(sorted(stages)) or "nothing that is still in the store"
    raise InputError(f"{run}:{stage}: the run has no artifact of stage {stage!r}; it has {has}")


def _digests(run: str, tracking: Tracking) -> list[str]:
    if not re.fullmatch("[0-9a-f]{6,32}", run):
        raise InputError(f"{run!r} is no MLflow run; give 6 or more characters of its id, as MLflow's UI shows it")

    def ask(client: Any) -> list[str]:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        begun = client.search_runs(experiments, f"attributes.run_id LIKE '{run}%'", max_results=3)
        if not begun:
            raise InputError(f"{run}: MLflow at {tracking.uri} has no run whose id begins so")
        if len(begun) > 1:
            ids = ", ".join(found.info.run_id for found in begun)
            raise InputError(f"{run}: begins the ids of several runs ({ids}); give more characters")
        below = client.search_runs(experiments, f"tags.`mlflow.parentRunId` = '{begun[0].info.run_id}'")
        return [found.data.tags["r1flow.digest"] for found in [*begun, *below] if "r1flow.digest" in found.data.tags]

    return tracking.ask(ask)


def how_made(run_id: str | None, tracking: Tracking) -> dict[str, str]:
    """ "recipe", "flow", "overrides" and "seed" of the recipe run that a stage's run belongs to, as far as MLflow has
    them: another tracking server than the one of that time knows nothing."""

    def ask(client: Any) -> dict[str, str]:
        tags = client.get_run(run_id).data.tags
        if parent := tags.get("mlflow.parentRunId"):
            tags = client.get_run(parent).data.tags
        return {
            name: tags[tag] for name in ("recipe", "flow", "overrides", "seed") if (tag := f"r1flow.{name}") in tags
        }

    try:
        return tracking.ask(ask) if run_id else {}
    except InputError:
        return {}
