"""Dispatch: stages run as their own flow runs on work pools, not in the recipe's process.

The store knows whether a stage is done; Prefect knows which flow run is working on it. If a recipe starts again, or a
second recipe needs the same artifact, it finds a live flow run by its tag and waits for it. A flow run that crashed is
started again and continues from its checkpoint; one that failed fails the recipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Crashed
from prefect.utilities.urls import url_for
from pydantic import BaseModel

from flows.home import store
from flows.progress import Progress
from flows.run.deployed import deployment_of, with_absolute_paths
from flows.run.dispatch_decisions import (
    ABOVE,
    FINAL,
    KEY,
    POLL_S,
    RECIPE_RUN,
    RUN_COUNT,
    Child,
    Job,
    decide,
    failure,
    pause_s,
    tag_value,
)
from flows.run.here import run_here
from flows.stage_contract.flow_run import FLOW_RUN
from flows.stage_contract.references import Input
from flows.stage_contract.runner import summary
from flows.stage_contract.stage import RunContext, Step, find_key
from tasks.store.objects.bucket import Unreachable
from tasks.trainer.outcome import StageFailed

QUIET_S = 30.0
"""Seconds without progress until the user is told what the recipe is waiting for."""
LOST_S = 15.0
"""A flow run counts as crashed if the lock of its stage has been abandoned for this many seconds. Workers report
sooner."""
SETTLE_S = 60.0
"""Seconds that a flow run has to record its end after its artifact was published."""
AWAY_S = 3600.0
"""Maximum seconds to wait for a server that does not answer."""

_T = TypeVar("_T")


def dispatch(step: Step, config: BaseModel, inputs: Mapping[str, str], seed: int, where: RunContext) -> dict[str, Any]:
    """Runs a stage on its work pool, waits for it, and returns the flow's result.

    An existing artifact is reused in this process, which needs no worker.

    Raises:
        InputError: the stage has no deployment, or refused its input.
        StageFailed: it failed, was cancelled, or crashed `TRIES` times; the message is the stage's own.
    """
    resolved, key = find_key(step.stage, config, inputs, seed)
    # `latest`, an alias or a key with several attempts may mean another artifact once the worker begins. A digest stays
    # the object that it is, by which Prefect draws the graph.
    inputs = {name: ref if ref == resolved[name].exact else resolved[name].exact for name, ref in inputs.items()}
    if not where.force and store().find(key, stage=step.name) is not None:
        return run_here(step, config, inputs, seed, where)
    # Prefect doubles its pauses while a server is unavailable: after a long outage, it would sleep for as long again.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}), get_client(sync_client=True) as client:
        result = _Dispatch(client, _job(client, step, config, resolved, inputs, seed, where, key)).run()
    # What another recipe's flow run made is recorded here as reused. The key: files may have changed.
    return result or run_here(step, config, inputs, seed, where.model_copy(update={"force": False, "key": key}))


def _job(
    client: SyncPrefectClient,
    step: Step,
    config: BaseModel,
    resolved: Mapping[str, Input],
    inputs: Mapping[str, str],
    seed: int,
    where: RunContext,
    key: str,
) -> Job:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "stages are dispatched by a recipe's flow"
    recipe_run_id, run_count = str(context.flow_run.id), context.flow_run.run_count
    parameters = {
        **step.parameters,
        "config": with_absolute_paths(step, config, resolved),
        "inputs": inputs,
        "seed": seed,
        "where": where.model_copy(update={"key": key}).model_dump(mode="json"),
    }
    min_attempt = _min_attempt(client, key, recipe_run_id) if where.force else None
    queue = context.flow_run.work_queue_name  # the recipe's priority; None if it runs in a terminal
    run_name = where.name_run(step.name, seed)
    return Job(step.name, run_name, deployment_of(step), key, parameters, recipe_run_id, run_count, min_attempt, queue)


def _min_attempt(client: SyncPrefectClient, key: str, recipe_run_id: str) -> int:
    """The attempt number that a forced stage has to reach: one above the newest when this recipe run first asked for
    it."""
    for run in _runs(client, [f"{KEY}{key}", f"{RECIPE_RUN}{recipe_run_id}"]):
        if (above := tag_value(run.tags, ABOVE)) is not None:
            return int(above) + 1
    newest = store().find(key, compare=False)
    return newest.attempt + 1 if newest else 1


def _runs(client: SyncPrefectClient, tags: list[str]) -> list[FlowRun]:
    with_tags = FlowRunFilter(tags=FlowRunFilterTags(all_=tags))
    runs = client.read_flow_runs(flow_run_filter=with_tags, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
    return sorted(runs, key=lambda run: run.created.timestamp() if run.created else 0.0)


class _Dispatch:
    """One job, from its first flow run to its artifact."""

    def __init__(self, client: SyncPrefectClient, job: Job):
        self.client, self.job = client, job
        self._printed: set[str] = set()
        self._last_change = time.monotonic()
        self._state: StateType | None = None
        self._abandoned: float | None = None
        self._last: UUID | None = None

    def run(self) -> dict[str, Any] | None:
        """Waits for the artifact. Returns the stage's result, or None if its flow run does not record it for this
        recipe run: it belongs to another one, never began, or broke off after publishing."""
        while (manifest := self._request(self.job.artifact)) is None:
            children = self._request(self._children)
            manifest = self._request(self.job.artifact)  # it may have been published since the first check
            if manifest is not None:
                break
            action = decide([child for child, _ in children])
            if action.kind == "fail":
                assert action.child is not None
                raise failure(action.child, self.job)
            alive = next((run for child, run in children if child == action.child), None)
            run = alive or self._request(self._start, sum(child.mine for child, _ in children))
            self._last = run.id
            self._wait(run)
        if self._last is None or not self._records(self._request(self.client.read_flow_run, self._last)):
            return None
        Progress.current().finished(self.job.stage, "ran", manifest.seconds, manifest.metrics, manifest.counts)
        return {**summary(manifest, "ran"), FLOW_RUN: str(self._last)}

    def _records(self, run: FlowRun) -> bool:
        """Whether a flow run records the artifact for this recipe run in MLflow, and makes it current."""
        ours = tag_value(run.tags, RECIPE_RUN) == self.job.recipe_run_id
        return ours and run.state is not None and run.state.type.value in ("COMPLETED", "RUNNING")

    def _children(self) -> list[tuple[Child, FlowRun]]:
        runs = _runs(self.client, [f"{KEY}{self.job.key}"])
        if self.job.min_attempt is not None:  # a flow run that is not forced would reuse what exists
            runs = [run for run in runs if tag_value(run.tags, ABOVE) is not None]
        return [(self._child(run), run) for run in runs]

    def _child(self, run: FlowRun) -> Child:
        mine = (tag_value(run.tags, RECIPE_RUN), tag_value(run.tags, RUN_COUNT)) == (
            self.job.recipe_run_id,
            str(self.job.run_count),
        )
        state = run.state
        assert state is not None
        return Child(run.id, state.type.value, state.message or "", mine)

    def _start(self, number: int) -> FlowRun:
        job = self.job
        run: Any = run_deployment(
            job.deployment,
            parameters=dict(job.parameters),
            timeout=0,
            flow_run_name=job.run_name,
            tags=job.tags,
            # The request is repeated if its answer is lost.
            idempotency_key=f"{job.recipe_run_id}-{job.run_count}-{job.key}-{number}",
            work_queue_name=job.queue,
        )
        self._last_change = time.monotonic()
        return run

    def _wait(self, run: FlowRun) -> None:
        """Waits until the flow run ends, or until its artifact has existed for SETTLE_S."""
        self._say(f"{self.job.stage}: flow run {url_for('flow-run', run.id) or run.id}")
        published: float | None = None
        began = time.monotonic()
        try:
            while True:
                run = self._request(self.client.read_flow_run, run.id)
                child = self._child(run)
                if child.type in FINAL:
                    return
                if self._request(self.job.artifact) is not None:
                    published = published or time.monotonic()
                    if child.type == "SCHEDULED" or time.monotonic() - published > SETTLE_S:
                        return
                elif self._is_lost(run):
                    state: Any = Crashed(message="Its process is gone: the lock of its stage was left behind.")
                    self._request(self.client.set_flow_run_state, run.id, state, force=True)
                    return
                self._explain(run)
                time.sleep(pause_s(time.monotonic() - began))
        except BaseException as error:
            self._cancel(run, error)
            raise

    def _is_lost(self, run: FlowRun) -> bool:
        running = run.state is not None and run.state.is_running()
        if not (running and run.start_time and store().is_abandoned(self.job.key, since=run.start_time)):
            self._abandoned = None
            return False
        self._abandoned = self._abandoned or time.monotonic()
        return time.monotonic() - self._abandoned > LOST_S

    def _explain(self, run: FlowRun) -> None:
        """Tells the user why a flow run does not begin, once QUIET_S has passed."""
        assert run.state is not None
        if run.state.type != self._state:
            self._state, self._last_change = run.state.type, time.monotonic()
        if time.monotonic() - self._last_change < QUIET_S or run.work_pool_name is None:
            return
        if run.state.is_pending():  # such as: its image cannot be pulled, or no node has so many GPUs
            self._say(
                f"{self.job.stage} waits: a worker of pool {run.work_pool_name!r} has taken flow run {run.name!r}, "
                "which has not begun; the worker's log says why, and if it is cancelled, the stage fails"
            )
        if not run.state.is_scheduled():
            return
        pool = self._request(self.client.read_work_pool, run.work_pool_name)
        if pool.is_paused:
            self._say(
                f"{self.job.stage} waits: work pool {pool.name!r} is paused; `prefect work-pool resume {pool.name}`"
            )
        elif pool.status is not None and pool.status.value != "READY":
            self._say(
                f"{self.job.stage} waits: work pool {pool.name!r} has no worker; `r1 up` or `prefect worker start "
                f"--pool {pool.name}` starts one"
            )
        else:
            self._say(f"{self.job.stage} waits for a free place in work pool {pool.name!r}")

    def _say(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            Progress.current().say(line)

    def _cancel(self, run: FlowRun, error: BaseException) -> None:
        """Cancels the flow run too if a person stopped the recipe that started it. If only this process was ended, the
        flow run continues."""
        if tag_value(run.tags, RECIPE_RUN) != self.job.recipe_run_id:
            return
        try:
            by_person = isinstance(error, KeyboardInterrupt)
            if not by_person:
                state = self.client.read_flow_run(UUID(self.job.recipe_run_id)).state
                by_person = state is not None and (state.is_cancelling() or state.is_cancelled())
            if by_person:
                self.client.set_flow_run_state(run.id, Cancelling(message="The recipe was cancelled."))
        except (httpx.HTTPError, PrefectHTTPStatusError):
            Progress.current().say(f"{self.job.stage}: the server could not be told to cancel flow run {run.id}")

    def _request(self, request: Callable[..., _T], *arguments: Any, **keywords: Any) -> _T:
        """Sends a request to the server or the object store, and waits if it is unavailable."""
        began = time.monotonic()
        while True:
            try:
                return request(*arguments, **keywords)
            except (httpx.TransportError, PrefectHTTPStatusError, Unreachable) as error:
                if isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500:
                    raise
                server = f"Prefect server at {self.client.api_url}"
                away = f"object store ({error})" if isinstance(error, Unreachable) else server
                if time.monotonic() - began > AWAY_S:
                    raise StageFailed(
                        f"the {away} has been away for {AWAY_S / 60:.0f} minutes; start it and give the same command: "
                        "it finds what is done, and who still works"
                    ) from error
                self._say(f"{self.job.stage}: the {away} does not answer; waiting")
                time.sleep(POLL_S)
