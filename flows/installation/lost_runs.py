"""Flow runs that Prefect calls Running although their process is gone, started by `r1 up` or in terminals.

In a running installation, `flows.installation.orphans` ends such runs by itself, but not those of `r1 run` in a
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed

from flows.installation.orphans import LOST_S, living, runs_in
from tasks.store.backend import Flaw
from tasks.tracking.audit import recipe_is_alive
from tasks.tracking.client import Tracking


def audit_prefect(record: Tracking, *, local: bool) -> Iterator[Flaw]:
    """Yields flow runs without a process, on the server of the current settings.

    `local`: all of the server's workers are on this machine, so a deployed run without a process here has none. A run
    in a terminal is identified by the process that its recipe's MLflow run names; without such an MLflow run it is left
    alone.
    """
    present = living()
    with get_client(sync_client=True) as client:
        runs = runs_in(client, [StateType.RUNNING, StateType.CANCELLING])
        alive: dict[UUID, bool] = {}
        for run in runs:
            outer = _outermost(client, run)
            if outer.id not in alive:
                alive[outer.id] = _is_alive(outer, present, record, local)
            if not alive[outer.id]:
                yield Flaw("running", f"Prefect flow run {run.id}", "is Running, and its process is gone", _end(run.id))


def _is_alive(outer: FlowRun, present: set[str], record: Tracking, local: bool) -> bool:
    """Whether a flow run has a process, or may have one."""
    started = outer.start_time or datetime.now(UTC)
    if (datetime.now(UTC) - started).total_seconds() < LOST_S or str(outer.id) in present:
        return True
    if outer.deployment_id is not None:
        return not local
    return recipe_is_alive(record, str(outer.id)) is not False


def _outermost(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """The flow run whose process runs this one: itself, or its parent."""
    while run.deployment_id is None and run.parent_task_run_id is not None:
        outer = client.read_task_run(run.parent_task_run_id).flow_run_id
        if outer is None:
            break
        run = client.read_flow_run(outer)
    return run


def _end(run_id: UUID) -> Callable[[], str]:
    def end() -> str:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run_id, Crashed(message="Its process is gone; ended by `r1 verify`."), force=True)
        return "marked Crashed"

    return end
