"""Handles orphaned flow runs of a local installation, so that none stays Running after its process is gone.

While they are alive, workers report the crash of a flow. If the worker or the machine died together with the flow,
nobody reports it. Here all workers are on this machine, so its processes tell the truth: a stage without a process has
crashed, and its recipe starts it again. A recipe without a process is scheduled again, reuses finished stages and waits
for those that still run.
"""

from __future__ import annotations

import itertools
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import AwaitingRetry, Cancelled, Crashed

from flows.prefect_flows import RECIPE_FLOWS
from flows.run.dispatch_decisions import TRIES

POLL_S = 5.0
LOST_S, NOT_BEGUN_S = 20.0, 120.0
"""Seconds without a process after which a running or a pending flow run counts as orphaned. Workers report sooner. A
pending run gets longer, because processes take time to start."""
_LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


@dataclass
class OrphanSweeper:
    """Finds orphaned flow runs, ends them, and schedules crashed recipes again."""

    client: SyncPrefectClient
    missing: dict[UUID, float] = field(default_factory=dict)  # when a live run was first seen without a process
    recipes: set[UUID] = field(default_factory=set)  # flow runs that were alive

    def sweep(self, last: bool = False) -> None:
        """Ends flow runs that have been without a process for too long (in the `last` sweep, immediately), and
        schedules crashed recipes again."""
        live_runs = {run.id: (run, self._deployed(run)) for run in runs_in(self.client, _LIVE)}
        runs = [run for run, deployed in live_runs.values() if deployed is not None]
        present = living()
        now = time.monotonic()
        self.missing = {
            run.id: self.missing.get(run.id, now) for run in runs if str(live_runs[run.id][1]) not in present
        }
        recipes = _recipe_flows(self.client)
        for run in runs:
            if run.flow_id in recipes:
                self.recipes.add(run.id)
            patience_s = 0.0 if last else NOT_BEGUN_S if run.state_type == StateType.PENDING else LOST_S
            if run.id in self.missing and now - self.missing[run.id] >= patience_s:
                self._end(run)
        if self.recipes:
            for run in runs_in(self.client, [StateType.CRASHED], sorted(self.recipes)):
                if str(run.id) in present:  # it is alive, but too busy to send its heartbeat
                    continue
                self.recipes.discard(run.id)
                if self._crashes(run) < TRIES:
                    self._set(run, AwaitingRetry(message="It lost its process and starts again."))

    def _crashes(self, run: FlowRun) -> int:
        """How often a run that has just crashed was started again, and once more. Its `run_count` also counts each time
        that it went on after a gate. A living process whose heartbeat was late is marked as crashed, too."""
        states = sorted(self.client.read_flow_run_states(run.id), key=lambda state: state.timestamp)
        return 1 + sum(a.is_crashed() and b.is_scheduled() for a, b in itertools.pairwise(states))

    def _deployed(self, run: FlowRun) -> UUID | None:
        """The flow run whose process runs this one: itself, or the recipe around it. None if it runs in a terminal,
        because that process does not carry the run's id."""
        while run.deployment_id is None:
            if run.parent_task_run_id is None:
                return None
            outer = self.client.read_task_run(run.parent_task_run_id).flow_run_id
            if outer is None:
                return None
            run = self.client.read_flow_run(outer)
        return run.id

    def _end(self, run: FlowRun) -> None:
        assert run.state is not None
        if run.state.is_cancelling():
            self._set(run, Cancelled(message="Its process is gone."))
        else:
            self._set(run, Crashed(message="Its process is gone, and its worker's with it."))

    def _set(self, run: FlowRun, state: Any) -> None:
        print(f"{run.name} ({run.id}): {run.state and run.state.name} -> {state.name}", flush=True)
        self.client.set_flow_run_state(run.id, state, force=True)


def runs_in(client: SyncPrefectClient, types: list[StateType], ids: list[UUID] | None = None) -> list[FlowRun]:
    """Flow runs in states of these types: all of them, or those with these ids."""
    filters: dict[str, Any] = {"state": {"type": {"any_": types}}}
    if ids is not None:
        filters["id"] = {"any_": ids}
    chosen = FlowRunFilter.model_validate(filters)
    runs: list[FlowRun] = []
    while page := client.read_flow_runs(flow_run_filter=chosen, offset=len(runs)):  # the server limits its length
        runs += page
    return runs


def _recipe_flows(client: SyncPrefectClient) -> set[UUID]:
    named = FlowFilter.model_validate({"name": {"any_": sorted({flow.name for flow in RECIPE_FLOWS.values()})}})
    return {flow.id for flow in client.read_flows(flow_filter=named)}


def living() -> set[str]:
    """Ids of flow runs with a process on this machine. Prefect puts the id into the process's environment."""
    mark = b"PREFECT__FLOW_RUN_ID="
    run_ids = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        run_ids |= {value.removeprefix(mark).decode() for value in values if value.startswith(mark)}
    return run_ids


def main() -> None:
    """Sweeps until SIGTERM, then once more for flow runs that stopped together with this process."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    with get_client(sync_client=True) as client:
        sweeper = OrphanSweeper(client)
        while True:
            last = bool(stopping)
            try:
                sweeper.sweep(last)
            except (httpx.HTTPError, PrefectHTTPStatusError) as error:
                print(f"the server does not answer: {error}", flush=True)
            if last:
                return
            deadline = time.monotonic() + POLL_S
            while time.monotonic() < deadline and not stopping:
                time.sleep(0.2)


if __name__ == "__main__":
    main()
