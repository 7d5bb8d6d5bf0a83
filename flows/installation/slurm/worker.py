"""A Prefect worker that submits each flow run to Slurm with `sbatch` and follows its job.

`prefect worker start --pool r1-gpu` finds it by the pool's type. Slurm is asked through its own commands, so the worker
runs wherever `sbatch` works, as the user who owns the jobs. What it knows of a job stands in Slurm (a comment with the
id of the flow run) and in Prefect (the job's id): a worker that is started again finds its jobs there.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import anyio.abc
import httpx
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import InfrastructureNotFound, ObjectNotFound, PrefectHTTPStatusError
from prefect.states import AwaitingRetry, Cancelled, Crashed
from prefect.workers.base import BaseVariables, BaseWorker, BaseWorkerResult

from flows.installation.slurm.job import SlurmJobConfiguration
from flows.installation.slurm.outcome import JobOutcome, outcome
from flows.installation.slurm.queue import SlurmJob, SlurmQueue, SlurmUnavailable
from flows.installation.supervisor import tail
from grpo.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from prefect.client.schemas.responses import WorkerFlowRunResponse

POLL_S = 5.0
RETRY_S = 20.0
"""Seconds until a submission is tried again when Slurm did not answer, or accepts no more jobs for now."""
SWEEP_S = 30.0
"""Seconds between two searches for jobs and flow runs that nobody follows."""
NOT_SUBMITTED_S = 300.0
"""Seconds after which a pending flow run without a job counts as not submitted: its worker died before `sbatch`."""
_ALIVE = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)


class SlurmVariables(BaseVariables):
    """Variables of a pool that was not made from deployments/pools/slurm.yaml: those of every pool."""


class SlurmWorkerResult(BaseWorkerResult):
    """The job that a flow run had. The worker itself sets the state of a run whose job ended badly, so the status code
    is always 0."""


class SlurmWorker(BaseWorker[SlurmJobConfiguration, SlurmVariables, SlurmWorkerResult]):
    """Submits flow runs as Slurm jobs."""

    type = "slurm"
    job_configuration = SlurmJobConfiguration
    job_configuration_variables = SlurmVariables
    _description = "Runs flows as jobs of a Slurm cluster, through sbatch."
    _display_name = "Slurm"

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._queue = SlurmQueue()
        self._followed: set[UUID] = set()
        self._swept: float | None = None
        self._problem = ""

    async def run(
        self,
        flow_run: FlowRun,
        configuration: SlurmJobConfiguration,
        task_status: anyio.abc.TaskStatus[Any] | None = None,
    ) -> SlurmWorkerResult:
        """Submits a job for a flow run, unless it has one, and follows it to its end.

        Raises:
            InputError: Slurm refused the job, or a setting cannot be right.
        """
        self._followed.add(flow_run.id)
        try:
            job_id = await self._submit(flow_run, configuration)
            if task_status is not None:
                task_status.started(str(job_id))
            await self._follow(flow_run, job_id, configuration.log())
        finally:
            self._followed.discard(flow_run.id)
        return SlurmWorkerResult(identifier=str(job_id), status_code=0)

    async def kill_infrastructure(
        self, infrastructure_pid: str, configuration: SlurmJobConfiguration, grace_seconds: int = 30
    ) -> None:
        """Cancels a job and waits for its end. Slurm sends SIGTERM, and SIGKILL after the cluster's KillWait (30 s)."""
        job = await self._queue.job(int(infrastructure_pid), fresh=True)
        if job.is_ended:
            raise InfrastructureNotFound(f"Slurm job {job.id} has ended ({job.state})")
        with suppress(InputError):  # it ended meanwhile
            await self._queue.cancel(job.id)
        deadline = time.monotonic() + grace_seconds + 60
        while not (await self._queue.job(job.id)).is_ended and time.monotonic() < deadline:
            await anyio.sleep(1)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Takes up what an earlier worker left, then submits what is scheduled."""
        if self._has_successfully_synced and (self._swept is None or time.monotonic() - self._swept > SWEEP_S):
            try:
                await self._sweep()
                self._swept = time.monotonic()
            except (SlurmUnavailable, InputError) as error:
                self._tell(str(error))
        return await super().get_and_submit_flow_runs()

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """Scheduled flow runs, without those whose job continues: a requeued job takes up its own run."""
        scheduled = await super()._get_scheduled_flow_runs()
        if not scheduled:
            return scheduled
        try:
            busy = {job.run_id for job in await self._queue.jobs(fresh=True) if not job.is_ended}
        except (SlurmUnavailable, InputError) as error:
            self._tell(str(error))
            return []
        return [entry for entry in scheduled if entry.flow_run.id not in busy | self._followed]

    async def _submit(self, flow_run: FlowRun, configuration: SlurmJobConfiguration) -> int:
        logger = self.get_flow_run_logger(flow_run)
        options, script = configuration.options_of_sbatch(), configuration.script()
        configuration.log().parent.mkdir(parents=True, exist_ok=True)
        told = ""
        while True:
            try:
                if (job := await self._queue.active_job(flow_run.id, fresh=True)) is not None:
                    logger.info("Slurm job %s already runs this flow run", job.id)
                    return job.id
                job_id = await self._queue.submit(options, script, configuration.environment(), flow_run.id)
            except SlurmUnavailable as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s; trying again every %g s", told, RETRY_S)
                if (state := (await self.client.read_flow_run(flow_run.id)).state) and not state.is_pending():
                    raise InputError(f"not submitted: the flow run is {state.name} by now") from None
                await anyio.sleep(RETRY_S)
            else:
                log = str(configuration.log()).replace("%j", str(job_id))
                logger.info("submitted as Slurm job %s; its output is in %s", job_id, log)
                return job_id

    async def _follow(self, flow_run: FlowRun, job_id: int, log: Path) -> None:
        """Returns when the job has ended and its flow run has the state that follows from it."""
        logger = self.get_flow_run_logger(flow_run)
        log = log.with_name(log.name.replace("%j", str(job_id)))
        since: dict[str, float] = {}  # when it was first seen cancelling, or ended
        told: set[str] = set()
        scancelled = False
        while True:
            try:
                run = await self.client.read_flow_run(flow_run.id)
                job = await self._queue.job(job_id)
                state = run.state.type if run.state else StateType.PENDING
                if job.is_ended or (job.is_waiting and state != StateType.PENDING):
                    # The listing may be older than the state of the run.
                    job = await self._queue.job(job_id, fresh=True)
                if state in (StateType.CANCELLING, *_FINAL):
                    since.setdefault("cancelling" if state == StateType.CANCELLING else "ended", time.monotonic())
                ages = {name: time.monotonic() - moment for name, moment in since.items()}
                result = outcome(job, state, cancelling_s=ages.get("cancelling"), ended_s=ages.get("ended"), log=log)
                self._explain(logger, job, told)
                if result.action == "scancel":
                    if not scancelled:
                        logger.info(result.message)
                        await self._queue.cancel(job_id)
                        scancelled = True
                elif result.action != "wait":
                    await self._set(run, result, log)
                    if job.is_ended:
                        return
            except ObjectNotFound:  # somebody deleted the flow run
                await self._queue.cancel(job_id)
                return
            except (SlurmUnavailable, InputError) as error:
                self._tell(str(error))
            except (httpx.HTTPError, PrefectHTTPStatusError) as error:
                self._tell(f"Prefect's server does not answer: {type(error).__name__}")
            await anyio.sleep(POLL_S)

    def _explain(self, logger: Any, job: SlurmJob, told: set[str]) -> None:
        """Logs why a job waits and where it runs, each once per start."""
        line = ""
        if job.is_waiting and job.reason not in ("", "None"):
            line = f"Slurm job {job.id} waits: {job.reason}"
        elif job.state == "RUNNING":
            line = f"Slurm job {job.id} runs on {job.nodes}" + (f", start {job.restarts + 1}" if job.restarts else "")
        elif job.state == "SUSPENDED":
            line = f"Slurm job {job.id} is suspended"
        if line and line not in told:
            told.add(line)
            logger.info(line)

    async def _set(self, run: FlowRun, result: JobOutcome, log: Path) -> None:
        """Gives a flow run the state that follows from its job."""
        message = result.message
        if result.action == "crashed" and log.exists():
            message += f": {tail(log)}"
        states: dict[str, State[Any]] = {
            "again": AwaitingRetry(message=message),
            "crashed": Crashed(message=message),
            "cancelled": Cancelled(message=message),
        }
        if (state := states.get(result.action)) is not None:
            await self.client.set_flow_run_state(run.id, state, force=True)
            self.get_flow_run_logger(run).info("%s: %s", state.name, message)

    async def _sweep(self) -> None:
        """Follows the jobs of this pool that nobody follows, and ends flow runs that have lost theirs."""
        jobs = [job for job in await self._queue.jobs(fresh=True) if job.run_id is not None]
        active = {job.run_id: job for job in jobs if not job.is_ended}
        known = self._followed | self._submitting_flow_run_ids
        filters: list[dict[str, Any]] = [{"state": {"type": {"any_": _ALIVE}}}]
        if unknown := [str(run_id) for run_id in active if run_id not in known]:
            filters.append({"id": {"any_": unknown}})
        pool = WorkPoolFilter.model_validate({"name": {"any_": [self._work_pool_name]}})
        for filter in filters:
            chosen = FlowRunFilter.model_validate(filter)
            runs: list[FlowRun] = []
            while page := await self.client.read_flow_runs(
                flow_run_filter=chosen, work_pool_filter=pool, offset=len(runs)
            ):
                runs += page
            for run in runs:
                if run.id in self._followed | self._submitting_flow_run_ids:
                    continue
                pid = run.infrastructure_pid or ""
                if (job := active.get(run.id)) is not None:
                    self._take_up(run, job.id)
                elif pid.isdecimal():
                    self._take_up(run, int(pid))
                else:
                    await self._submit_again(run)

    def _take_up(self, run: FlowRun, job_id: int) -> None:
        async def follow() -> None:
            try:
                if run.infrastructure_pid != str(job_id):
                    await self.client.update_flow_run(flow_run_id=run.id, infrastructure_pid=str(job_id))
                await self._follow(run, job_id, await self._log_of(run))
            except Exception:  # here it would end the worker; the next sweep takes the job up again
                self.get_flow_run_logger(run).exception("lost sight of Slurm job %s", job_id)
            finally:
                self._followed.discard(run.id)
                self._release_limit_slot(run.id)

        assert self._runs_task_group is not None
        self._followed.add(run.id)
        if self._limiter is not None:
            with suppress(anyio.WouldBlock):  # its job runs already, whatever the limit is today
                self._limiter.acquire_on_behalf_of_nowait(run.id)
        self.get_flow_run_logger(run).info("worker %s follows Slurm job %s", self.name, job_id)
        self._runs_task_group.start_soon(follow)

    async def _log_of(self, run: FlowRun) -> Path:
        """Path of the log of a job that an earlier worker submitted, by the pool's settings of today."""
        configuration = await self.job_configuration.resolve_for_flow_run(
            run, client=self.client, work_pool=self.work_pool, worker_name=self.name, worker_id=self.backend_id
        )
        return configuration.log()

    async def _submit_again(self, run: FlowRun) -> None:
        """Schedules a flow run again whose worker died before it submitted a job."""
        state = run.state
        if state is None or not state.is_pending() or state.timestamp is None:
            return
        if time.time() - state.timestamp.timestamp() > NOT_SUBMITTED_S:
            again: State[Any] = AwaitingRetry(message="Its worker ended before it submitted a job.")
            await self.client.set_flow_run_state(run.id, again, force=True)

    def _tell(self, problem: str) -> None:
        """Logs a problem once, until there is another."""
        if problem != self._problem:
            self._problem = problem
            self._logger.warning("%s; trying again", problem)
