"""Compares MLflow with the store: runs without a live process, aliases without an artifact, stale runs, and old runs
whose artifacts are no longer kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from tasks.store.backend import Flaw
from tasks.store.stale import stale_reasons
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import Connection, every_result
from tasks.tracking.reuse import reuses
from tasks.tracking.run_owner import is_alive, runs_of_dead_processes
from tasks.tracking.tags import (
    DIGEST_TAG,
    FLOW_RUN_TAG,
    PARENT_TAG,
    SHA256_TAG,
    STALE_TAG,
    WAITING_TAG,
    is_waiting,
)

_PAGE = 200
"""Runs per page of results. Each run has hundreds of parameters."""


@dataclass(frozen=True)
class OldRun:
    """A top-level run with the ids of its stages' runs."""

    id: str
    name: str
    ended: float  # seconds since 1970
    stages: list[str]


def old_runs(connection: Connection, before: float, kept: Collection[str]) -> list[OldRun]:
    """Top-level runs that ended before a time (seconds since 1970), oldest first. Leaves out a run that was continued
    since and is running, one that waits for an answer to a gate, and one that made an artifact whose digest is in
    `kept`, or one of whose stages did.

    Raises:
        InputError: MLflow cannot be reached.
    """
    runs = connection.ask(lambda client: list(_ended(client, connection.experiments(), before)))
    stages: dict[str, list[Any]] = {}
    for run in runs:
        stages.setdefault(run.data.tags.get(PARENT_TAG, ""), []).append(run)
    found = []
    for run in stages.get("", []):
        below = stages.get(run.info.run_id, [])
        if not is_waiting(run.data.tags) and not {each.data.tags.get(DIGEST_TAG) for each in [run, *below]} & set(kept):
            ids = [stage.info.run_id for stage in below]
            found.append(OldRun(run.info.run_id, run.info.run_name, run.info.end_time / 1000, ids))
    return found


def _ended(client: Any, experiments: list[str], before: float) -> Iterator[Any]:
    # MLflow keeps the end time of a run that was reopened.
    condition = f"attributes.end_time < {int(before * 1000)} and attributes.status != 'RUNNING'"
    order = ["attributes.end_time ASC"]
    return every_result(client.search_runs, experiments, condition, max_results=_PAGE, order_by=order)


def delete_runs(connection: Connection, runs: list[OldRun]) -> None:
    """Marks runs and their stages' runs as deleted. MLflow hides them, and `mlflow gc` removes them for good."""

    def delete(client: Any) -> None:
        for run in runs:
            for run_id in [*run.stages, run.id]:
                client.delete_run(run_id)

    connection.ask(delete)


def audit_tracking(connection: Connection, digests: Collection[str]) -> Iterator[Flaw]:
    """Yields what is wrong in MLflow. `digests`: digests of the artifacts in the store.

    Raises:
        InputError: MLflow cannot be reached.
    """
    for run_id in connection.or_stop(lambda: runs_of_dead_processes(connection)):
        yield Flaw(
            "running", f"MLflow run {run_id}", "is RUNNING, and its process is gone", _ending(connection, run_id)
        )
    for name, digest in sorted(promoted(connection).items()):
        if digest not in digests:
            said = f"leads to artifact {digest[:12]}, which is not in the store, or damaged"
            remedy = "make it again, or `r1 promote` another"
            yield Flaw("missing", f"alias {name}", said, remedy=remedy)


def promoted(connection: Connection) -> dict[str, str]:
    """ALIAS@MODEL -> digest of the artifact, for every alias in the model registry."""

    def search(client: Any) -> dict[str, str]:
        versions = {
            f"{alias}@{model.name}": client.get_model_version(model.name, version)
            for model in every_result(client.search_registered_models)
            for alias, version in model.aliases.items()
        }
        return {name: version.tags[SHA256_TAG] for name, version in versions.items() if SHA256_TAG in version.tags}

    return connection.ask(search)


def digests_in_use(connection: Connection) -> set[str]:
    """Digests of the artifacts made, reused or read by runs that are RUNNING and whose process may be alive, or that
    wait for an answer to a gate."""

    def search(client: Any) -> set[str]:
        experiments = connection.experiments()
        running = client.search_runs(experiments, "attributes.status = 'RUNNING'", max_results=10_000)
        waiting = client.search_runs(experiments, f"tags.`{WAITING_TAG}` LIKE '%'", max_results=10_000)
        digests: set[str] = set()
        for run in {run.info.run_id: run for run in [*running, *waiting]}.values():
            if is_waiting(run.data.tags) or (run.info.status == "RUNNING" and is_alive(run.data.tags)):
                digests |= {reuse.digest for reuse in reuses(run.data.tags)}
                stages = client.search_runs(experiments, f"tags.`{PARENT_TAG}` = '{run.info.run_id}'")
                for stage in [run, *stages]:
                    digests |= {stage.data.tags[DIGEST_TAG]} if DIGEST_TAG in stage.data.tags else set()
                    for entry in stage.inputs.dataset_inputs:
                        digests |= {tag.value for tag in entry.tags if tag.key == SHA256_TAG}
        return digests

    return connection.ask(search)


def recipe_is_alive(connection: Connection, flow_run: str) -> bool | None:
    """Whether the process that records a recipe's Prefect flow run in MLflow may still be alive. None if MLflow has no
    run for it."""

    def search(client: Any) -> bool | None:
        runs = client.search_runs(connection.experiments(), f"tags.`{FLOW_RUN_TAG}` = '{flow_run}'", max_results=1)
        return is_alive(runs[0].data.tags) if runs else None

    return connection.ask(search)


def _ending(connection: Connection, run_id: str) -> Callable[[], str]:
    def end() -> str:
        connection.ask(lambda client: client.set_terminated(run_id, "KILLED"))
        return "marked KILLED"

    return end


def update_stale_tags(store: Store, tracking: Tracking) -> None:
    """Tags the runs that made stale artifacts with the reason, and removes the tag from all other runs."""
    reasons = stale_reasons(store)
    missing = {m.mlflow_run_id: reasons[m.key] for m in store.list() if m.key in reasons and m.mlflow_run_id}
    for run_id, reason in tracking.tagged(STALE_TAG).items():
        if run_id not in missing:
            tracking.delete_tag(run_id, STALE_TAG)
        elif missing[run_id] == reason:
            del missing[run_id]
    for run_id, reason in missing.items():
        tracking.set_tags(run_id, {STALE_TAG: reason})
