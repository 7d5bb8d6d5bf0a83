"""Stages as flow runs of their own, on the work pools of their deployments, instead of in the recipe's process.

The store says whether a stage is done; Prefect says who works on it. So a recipe that starts again, or a second one
that needs the same artifact, finds a flow run that is still alive by its tag and waits for it instead of starting
another. One that crashed is started again and continues from its checkpoint; one that failed fails the recipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling, Crashed
from prefect.utilities.urls import url_for
from pydantic import BaseModel

from flows.home import home, store
from flows.pipelines import Step
from flows.prefect_server import without_heartbeat
from flows.progress import Progress
from flows.stages.contract import Input, Where, find_key, summary
from grpo.errors import InputError
from tasks.store.store import Manifest
from tasks.trainer.launch import StageFailed

DEPLOYMENT = "r1flow"
"""What every flow's deployment is called."""
TRIES = 3
"""Flow runs of one stage that may crash before the recipe gives up."""
POLL_S = 2.0
QUIET_S = 30.0
"""How long nothing happens before a person is told what is waited for."""
LOST_S = 15.0
"""How long the lock of a stage lies abandoned before its flow run counts as crashed. Workers report a crash sooner."""
SETTLE_S = 60.0
"""What a flow run gets after its artifact was published, to record its end."""
AWAY_S = 3600.0
"""How long a server that does not answer is waited for."""

_KEY, _BY, _LIFE, _ABOVE = "r1flow.key:", "r1flow.by:", "r1flow.life:", "r1flow.above:"
_ERROR = "Flow run encountered an exception: "
_T = TypeVar("_T")


@dataclass(frozen=True)
class Job:
    """A stage to be run elsewhere. `by` is the recipe's flow run and `life` counts its starts. `above`: a forced stage
    is done by an attempt with a higher number than this, None where any artifact of the key will do. `queue` of the
    stage's pool, None for its deployment's own."""

    stage: str
    deployment: str
    key: str
    parameters: Mapping[str, Any]
    by: str
    life: int
    above: int | None = None
    queue: str | None = None

    @property
    def tags(self) -> list[str]:
        forced = [] if self.above is None else [f"{_ABOVE}{self.above}"]
        return [f"{_KEY}{self.key}", f"{_BY}{self.by}", f"{_LIFE}{self.life}", *forced]

    def made(self) -> Manifest | None:
        """The artifact that ends the job, if it is there."""
        found = store().find(self.key)
        return found if found and found.attempt > (self.above or 0) else None


@dataclass(frozen=True)
class Child:
    """A flow run of a job. `mine`: this life of this recipe run started it."""

    id: Any
    type: str  # Prefect's state type
    message: str = ""
    mine: bool = True


@dataclass(frozen=True)
class Move:
    """What to do next: wait for a child, start one, or fail with what a child said."""

    kind: str  # "wait" | "start" | "fail"
    child: Child | None = None


FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
_CLOSEST_TO_THE_END = ("CANCELLING", "RUNNING", "PENDING", "PAUSED", "SCHEDULED")


def decide(children: Sequence[Child]) -> Move:
    """What to do about a job whose artifact is missing, by its flow runs so far, the oldest first.

    Whoever works on it is waited for, whoever started it. How a flow run of another recipe run, or of an earlier life
    of this one, ended says nothing: the artifact is missing, so the stage runs. Of ours a crash is tried again.
    """
    alive = [child for child in children if child.type not in FINAL]
    if alive:
        return Move("wait", min(alive, key=lambda child: _CLOSEST_TO_THE_END.index(child.type)))
    mine = [child for child in children if child.mine]
    if not mine:
        return Move("start")
    crashed = sum(child.type == "CRASHED" for child in mine)
    return Move("start") if mine[-1].type == "CRASHED" and crashed < TRIES else Move("fail", mine[-1])


def dispatch(step: Step, config: BaseModel, inputs: Mapping[str, str], seed: int, where: Where) -> dict[str, Any]:
    """Run a stage on its work pool and wait for it; what its flow returns.

    What the store already holds is reused here: that needs no worker.

    Raises:
        InputError: it has no deployment, or refused its input.
        StageFailed: it failed, was cancelled, or crashed `TRIES` times; the message is the stage's own.
    """
    found, key = find_key(step.stage, config, inputs, seed)
    if not where.force and store().find(key) is not None:
        return run_here(step, config, inputs, seed, where)
    # Prefect doubles its pauses while a server is away: after a long outage it would sleep as long again.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 2}), get_client(sync_client=True) as client:
        return _Dispatch(client, _job(client, step, config, found, inputs, seed, where, key)).run()


def run_here(step: Step, config: BaseModel, inputs: Mapping[str, str], seed: int, where: Where) -> dict[str, Any]:
    """Run a stage in this process; what its flow returns."""
    reused = not where.force and store().find(find_key(step.stage, config, inputs, seed)[1]) is not None
    with without_heartbeat() if reused else nullcontext():
        done: dict[str, Any] = step.flow(config, inputs=inputs, seed=seed, where=where)
    return done


def deployment_of(step: Step) -> str:
    """The name of a step's deployment, as Prefect has it: FLOW/DEPLOYMENT."""
    flow: Any = step.flow.func if isinstance(step.flow, partial) else step.flow
    return f"{flow.name}/{DEPLOYMENT}"


def check_deployments(graph: Iterable[Step]) -> None:
    """Before anything runs: all steps have a deployment on the server.

    Raises:
        InputError: one has none.
    """
    with get_client(sync_client=True) as client:
        for name in dict.fromkeys(deployment_of(step) for step in graph):
            try:
                client.read_deployment_by_name(name)
            except ObjectNotFound:
                raise InputError(f"no deployment {name} at {client.api_url}; `r1 deploy` registers it") from None


def _job(
    client: SyncPrefectClient,
    step: Step,
    config: BaseModel,
    found: Mapping[str, Input],
    inputs: Mapping[str, str],
    seed: int,
    where: Where,
    key: str,
) -> Job:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "stages are dispatched by a recipe's flow"
    by, life = str(context.flow_run.id), context.flow_run.run_count
    keywords = step.flow.keywords if isinstance(step.flow, partial) else {}
    parameters = {
        **keywords,
        # Only what was set: a field left out gets the same default there, and stays one that nobody set.
        "config": _from_anywhere(config.model_dump(mode="json", exclude_unset=True), step, config, found),
        "inputs": {
            name: str(found[name].path) if found[name].manifest is None else ref for name, ref in inputs.items()
        },
        "seed": seed,
        "where": where.model_copy(update={"key": key}).model_dump(mode="json"),
    }
    above = _above(client, key, by) if where.force else None
    # A recipe that gives way to others does so in every stage. None: it runs in a terminal.
    queue = context.flow_run.work_queue_name
    return Job(step.name, deployment_of(step), key, parameters, by, life, above, queue)


def _from_anywhere(value: Any, step: Step, config: BaseModel, found: Mapping[str, Input]) -> Any:
    """The configuration with whole paths: a worker's working directory is another."""
    paths = {str(path): str(found[name].path) for name, path in step.stage.files(config).items()}

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: whole(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [whole(inner) for inner in value]
        return paths.get(value, value) if isinstance(value, str) else value

    return whole(value)


def _above(client: SyncPrefectClient, key: str, by: str) -> int:
    """The attempt that a forced stage has to surpass: the newest one when this recipe run first asked for it."""
    for run in _runs(client, [f"{_KEY}{key}", f"{_BY}{by}"]):
        if (above := _tag(run, _ABOVE)) is not None:
            return int(above)
    found = store().find(key)
    return found.attempt if found else 0


def _runs(client: SyncPrefectClient, tags: list[str]) -> list[FlowRun]:
    wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=tags))
    runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
    return sorted(runs, key=lambda run: run.created.timestamp() if run.created else 0.0)


def _tag(run: FlowRun, prefix: str) -> str | None:
    return next((tag.removeprefix(prefix) for tag in run.tags if tag.startswith(prefix)), None)


class _Dispatch:
    """One job until its artifact is there."""

    def __init__(self, client: SyncPrefectClient, job: Job):
        self.client, self.job = client, job
        self._told: set[str] = set()
        self._since = time.monotonic()  # that nothing has changed
        self._state: StateType | None = None
        self._abandoned: float | None = None

    def run(self) -> dict[str, Any]:
        while (made := self.job.made()) is None:
            children = self._ask(self._children)
            made = self.job.made()  # published between the two questions
            if made is not None:
                break
            move = decide([child for child, _ in children])
            if move.kind == "fail":
                assert move.child is not None
                raise self._failure(move.child)
            alive = next((run for child, run in children if child == move.child), None)
            self._wait(alive or self._ask(self._start, sum(child.mine for child, _ in children)))
        Progress.current().finished(self.job.stage, "ran", made.seconds, made.metrics)
        return summary(made, "ran")

    def _children(self) -> list[tuple[Child, FlowRun]]:
        runs = _runs(self.client, [f"{_KEY}{self.job.key}"])
        if self.job.above is not None:  # a run that is content with what exists does not force
            runs = [run for run in runs if _tag(run, _ABOVE) is not None]
        return [(self._child(run), run) for run in runs]

    def _child(self, run: FlowRun) -> Child:
        mine = (_tag(run, _BY), _tag(run, _LIFE)) == (self.job.by, str(self.job.life))
        state = run.state
        assert state is not None
        return Child(run.id, state.type.value, state.message or "", mine)

    def _start(self, number: int) -> FlowRun:
        job = self.job
        run: Any = run_deployment(
            job.deployment,
            parameters=dict(job.parameters),
            timeout=0,
            flow_run_name=job.stage,
            tags=job.tags,
            idempotency_key=f"{job.by}-{job.life}-{job.key}-{number}",  # asked again when an answer was lost
            work_queue_name=job.queue,
        )
        self._since = time.monotonic()
        return run

    def _wait(self, run: FlowRun) -> None:
        """Until the flow run ends, or its artifact was there for a while."""
        self._say(f"{self.job.stage}: flow run {url_for('flow-run', run.id) or run.id}")
        published: float | None = None
        try:
            while True:
                run = self._ask(self.client.read_flow_run, run.id)
                child = self._child(run)
                if child.type in FINAL:
                    return
                if self.job.made() is not None:
                    published = published or time.monotonic()
                    if child.type == "SCHEDULED" or time.monotonic() - published > SETTLE_S:
                        return
                elif self._is_lost(run):
                    state: Any = Crashed(message="Its process is gone: the lock of its stage was left behind.")
                    self._ask(self.client.set_flow_run_state, run.id, state, force=True)
                    return
                self._explain(run)
                time.sleep(POLL_S)
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
        """Why a flow run does not begin, once it has not for a while."""
        assert run.state is not None
        if run.state.type != self._state:
            self._state, self._since = run.state.type, time.monotonic()
        if not run.state.is_scheduled() or time.monotonic() - self._since < QUIET_S or run.work_pool_name is None:
            return
        pool = self._ask(self.client.read_work_pool, run.work_pool_name)
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
        if line not in self._told:
            self._told.add(line)
            Progress.current().say(line)

    def _failure(self, child: Child) -> Exception:
        said = " ".join(child.message.split())
        place = url_for("flow-run", child.id) or str(child.id)
        if child.type == "CANCELLED":
            return StageFailed(f"its flow run was cancelled; see {place}")
        if child.type == "COMPLETED":
            return StageFailed(
                f"its flow run ended well, but {home()} has no artifact {self.job.key[:16]}; its worker must have the "
                f"same R1FLOW_HOME; see {place}"
            )
        kind, colon, text = said.partition(_ERROR)[2].partition(": ")
        if colon and child.type == "FAILED":
            return InputError(text) if kind == "InputError" else StageFailed(text)
        crashes = f"crashed {TRIES} times; the last said: " if child.type == "CRASHED" else ""
        return StageFailed(f"{crashes}{said or 'nothing'}; see {place}")

    def _cancel(self, run: FlowRun, error: BaseException) -> None:
        """Take the flow run along if a person stopped the recipe; if only our process is ended, it goes on."""
        try:
            meant = isinstance(error, KeyboardInterrupt)
            if not meant:
                state = self.client.read_flow_run(UUID(self.job.by)).state
                meant = state is not None and (state.is_cancelling() or state.is_cancelled())
            if meant:
                self.client.set_flow_run_state(run.id, Cancelling(message="The recipe was cancelled."))
        except (httpx.HTTPError, PrefectHTTPStatusError):
            Progress.current().say(f"{self.job.stage}: the server could not be told to cancel flow run {run.id}")

    def _ask(self, question: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """An answer of the server; one that is away is waited for."""
        began = time.monotonic()
        while True:
            try:
                return question(*arguments, **named)
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                if isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500:
                    raise
                if time.monotonic() - began > AWAY_S:
                    raise StageFailed(
                        f"the Prefect server at {self.client.api_url} has been away for {AWAY_S / 60:.0f} minutes; "
                        "start it and give the same command: it finds what is done, and who still works"
                    ) from error
                self._say(f"{self.job.stage}: the Prefect server at {self.client.api_url} does not answer; waiting")
                time.sleep(POLL_S)
