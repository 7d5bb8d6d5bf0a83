"""The worker against a real Slurm cluster, with a shell script as the flow and files as Prefect's server: the life of a
job, case by case, in seconds of computing. The slow tests of test_slurm_jobs.py have Prefect and a trainer too."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import InfrastructureNotFound

from flows.installation.slurm import worker as worker_module
from flows.installation.slurm.job import SlurmJobConfiguration
from flows.installation.slurm.worker import SlurmWorker
from tests.support.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = [pytest.mark.slow, needs_slurm]

FLOW_ID = "00000000-0000-0000-0000-000000000001"
DEADLINE_S = 1200.0
S = StateType
FLOW = """\
cd {folder}; run=$PREFECT__FLOW_RUN_ID
echo "$PET_NODE_RANK $SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}" >> $run.starts
n=$(cat $run.checkpoint 2>/dev/null || echo 0)
trap 'sleep 1; echo $n > $run.checkpoint; echo SCHEDULED > $run.state; exit 0' TERM
echo RUNNING > $run.state
while [ ! -e $run.finish ]; do n=$((n + 1)); sleep 0.2; done
[ -s $run.finish ] && exit $(cat $run.finish)
echo COMPLETED > $run.state
"""
"""Counts steps, saves them when it is told to stop, and ends when a file tells it to, with the exit code in there."""


class FilePrefect:
    """The part of Prefect's client that the worker uses, over a folder. The flow writes its states there, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pids: dict[UUID, str] = {}
        self.messages: dict[UUID, str] = {}

    def add(self) -> FlowRun:
        run = FlowRun(id=uuid4(), name="calm-otter", flow_id=FLOW_ID)
        self.set(run.id, S.PENDING)
        return run

    def set(self, id: UUID, state: StateType) -> None:
        (self.folder / f"{id}.state").write_text(f"{state.value}\n")

    def state(self, id: UUID) -> StateType:
        while not (text := (self.folder / f"{id}.state").read_text().strip()):
            pass  # it is being written
        return StateType(text)

    async def read_flow_run(self, id: UUID) -> FlowRun:
        state: State[Any] = State(type=self.state(id))
        return FlowRun(id=id, name="calm-otter", flow_id=FLOW_ID, state=state, infrastructure_pid=self.pids.get(id))

    async def read_flow_runs(self, flow_run_filter: Any, work_pool_filter: Any, offset: int) -> list[FlowRun]:
        runs = [await self.read_flow_run(UUID(path.stem)) for path in sorted(self.folder.glob("*.state"))]
        if flow_run_filter.id is not None:
            found = [run for run in runs if run.id in flow_run_filter.id.any_]
        else:
            found = [run for run in runs if run.state and run.state.type in flow_run_filter.state.type.any_]
        return found[offset : offset + 200]  # a page of Prefect's server

    async def set_flow_run_state(self, id: UUID, state: State[Any], force: bool) -> None:
        self.messages[id] = state.message or ""
        self.set(id, state.type)

    async def update_flow_run(self, flow_run_id: UUID, infrastructure_pid: str) -> None:
        self.pids[flow_run_id] = infrastructure_pid


class Worker(SlurmWorker):
    """The worker, without Prefect's server."""

    def __init__(self, prefect: FilePrefect):
        super().__init__(work_pool_name="r1-gpu")
        self._client: Any = prefect
        self.lines: list[str] = []

    def get_flow_run_logger(self, flow_run: FlowRun) -> Any:
        logger = logging.Logger("worker")
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        return logger

    async def _log_of(self, run: FlowRun) -> Path:
        return SlurmJobConfiguration().log()


class Bench:
    """A cluster, Prefect's files, and workers that start and die."""

    def __init__(self, cluster: SlurmCluster, folder: Path):
        self.cluster, self.folder, self.prefect = cluster, folder, FilePrefect(folder)
        (folder / "flow.sh").write_text(FLOW.format(folder=folder))

    def configuration(self, run: FlowRun, **values: Any) -> SlurmJobConfiguration:
        made = SlurmJobConfiguration(command=f"bash {self.folder}/flow.sh", **values)
        made.prepare_for_flow_run(run)
        return made

    def job(self, run: FlowRun) -> str:
        """Ids and states of the jobs of a flow run: `5 RUNNING`."""
        listed = self.cluster.ask("squeue", "--noheader", "--states=all", "--format=%A|%T|%k").splitlines()
        return "; ".join(" ".join(line.split("|")[:2]) for line in listed if line.endswith(f"|r1flow:{run.id}"))

    def starts(self, run: FlowRun) -> int:
        path = self.folder / f"{run.id}.starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def checkpoint(self, run: FlowRun) -> int:
        path = self.folder / f"{run.id}.checkpoint"
        return int(path.read_text()) if path.exists() else -1

    def finish(self, run: FlowRun, code: str = "") -> None:
        (self.folder / f"{run.id}.finish").write_text(code)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come\n{self.cluster.logs()}"
            await anyio.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def bench(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, value in {**cluster.environment, "R1FLOW_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker_module, "POLL_S", 1.0)
    (tmp_path / "home").mkdir()
    (tmp_path / "runs").mkdir()
    return Bench(cluster, tmp_path / "runs")


def play(
    bench: Bench, scene: Callable[[Worker, FlowRun, anyio.abc.TaskGroup], Coroutine[Any, Any, None]], **values: Any
) -> Worker:
    """Submits a flow run with these settings, and plays a scene beside the worker that follows it to its end."""
    worker, run = Worker(bench.prefect), bench.prefect.add()

    async def both() -> None:
        async with anyio.create_task_group() as group:
            worker._runs_task_group = group
            group.start_soon(worker.run, run, bench.configuration(run, **values))
            await scene(worker, run, group)

    asyncio.run(both())
    return worker


def test_a_job_runs_to_its_end(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        await bench.until(lambda: any("runs on n" in line for line in worker.lines), "the line about its node")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")
        assert bench.prefect.state(run.id) == S.COMPLETED

    lines = play(bench, scene).lines
    assert "submitted as Slurm job" in lines[0] and lines[0].endswith(".log")


def test_a_job_that_fails_says_why(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.finish(run, "7")
        await bench.until(lambda: bench.prefect.state(run.id) == S.CRASHED, "the crash")
        assert "exit code 7), and its flow run did not." in bench.prefect.messages[run.id]

    play(bench, scene, setup="echo 'module load: done'")


def test_a_waiting_job_gives_its_reason_once_and_is_cancelled(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: any("waits: PartitionDown" in line for line in worker.lines), "the reason")
        await anyio.sleep(5)
        assert sum("waits: PartitionDown" in line for line in worker.lines) == 1
        bench.prefect.set(run.id, S.CANCELLING)
        await bench.until(lambda: bench.prefect.state(run.id) == S.CANCELLED, "the end")
        assert bench.job(run).endswith("CANCELLED")

    play(bench, scene, partition="empty")


def test_scancel_lets_the_flow_save_and_cancels_the_run(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.cluster.ask("scancel", bench.job(run).split()[0])
        await bench.until(lambda: bench.prefect.state(run.id) == S.CANCELLED, "the end")
        assert bench.checkpoint(run) >= 0
        assert bench.prefect.messages[run.id].endswith("was cancelled with scancel.")

    play(bench, scene)


def test_prefect_kills_a_job_that_is_there_and_knows_one_that_is_not(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        number = bench.job(run).split()[0]
        await worker.kill_infrastructure(number, bench.configuration(run))
        assert bench.job(run) == f"{number} CANCELLED"
        with pytest.raises(InfrastructureNotFound, match=r"^Slurm job \d+ has ended \(CANCELLED\)$"):
            await worker.kill_infrastructure(number, bench.configuration(run))

    play(bench, scene)


def test_a_cancelled_flow_that_does_not_stop_is_scancelled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.installation.slurm.outcome.CANCEL_S", 3.0)

    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.prefect.set(run.id, S.CANCELLING)
        await bench.until(lambda: bench.prefect.state(run.id) == S.CANCELLED, "the end")
        assert bench.job(run).endswith("CANCELLED")

    play(bench, scene)


def test_the_time_limit_saves_and_the_same_job_continues(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.SCHEDULED, "the signal before the time limit")
        await bench.until(lambda: "PENDING" in bench.job(run), "the requeue")
        saved = bench.checkpoint(run)
        assert saved > 0
        await bench.until(lambda: bench.starts(run) == 2, "the second start")
        await bench.until(lambda: any("start 2" in line for line in worker.lines), "the line about it")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")
        first, second = (bench.folder / f"{run.id}.starts").read_text().split("\n")[:2]
        assert first.split()[0] == second.split()[0] and second.split()[1] == "1"  # one job, started again

    play(bench, scene, time="2", stop_before_end_s=60)


def test_without_requeue_the_run_waits_for_another_job(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.cluster.ask("scancel", "--batch", "--signal=USR1", bench.job(run).split()[0])
        await bench.until(lambda: bench.job(run).endswith("FAILED"), "its end")
        assert bench.prefect.state(run.id) == S.SCHEDULED  # Prefect offers it to a worker again
        assert bench.checkpoint(run) >= 0

    play(bench, scene, requeue=False)


def test_a_job_that_somebody_requeues_continues(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.prefect.set(run.id, S.RUNNING)
        bench.cluster.ask("scontrol", "requeue", bench.job(run).split()[0])
        await bench.until(lambda: bench.prefect.state(run.id) == S.SCHEDULED, "AwaitingRetry")
        await bench.until(lambda: bench.starts(run) == 2, "the second start")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")
        assert bench.prefect.state(run.id) == S.COMPLETED

    play(bench, scene)


def test_a_lost_node_lets_the_run_wait_and_continue(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.cluster.ask("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=lost")
        await bench.until(lambda: bench.prefect.state(run.id) == S.SCHEDULED, "AwaitingRetry")
        bench.cluster.ask("scontrol", "update", "NodeName=n1", "State=RESUME")
        await bench.until(lambda: bench.starts(run) >= 2, "the second start")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")

    play(bench, scene, options=["--nodelist=n1"])


def test_a_new_worker_finds_the_job_and_submits_none(bench: Bench) -> None:
    first, run = Worker(bench.prefect), bench.prefect.add()

    async def die() -> None:
        async with anyio.create_task_group() as group:
            first._runs_task_group = group
            group.start_soon(first.run, run, bench.configuration(run))
            await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
            group.cancel_scope.cancel()  # before Prefect knew the job's id

    asyncio.run(die())
    second = Worker(bench.prefect)

    async def take_up() -> None:
        async with anyio.create_task_group() as group:
            second._runs_task_group = group
            await second._sweep()
            await second._sweep()
            assert second._followed == {run.id}
            bench.finish(run, "3")

    asyncio.run(take_up())
    number, state = bench.job(run).split()
    assert (state, bench.starts(run), bench.prefect.pids[run.id]) == ("FAILED", 1, number)
    assert sum(f"follows Slurm job {number}" in line for line in second.lines) == 1
    assert bench.prefect.state(run.id) == S.CRASHED


def test_a_run_that_has_a_job_gets_no_second_one(bench: Bench) -> None:
    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        other = Worker(bench.prefect)
        group.start_soon(other.run, run, bench.configuration(run))
        await bench.until(lambda: any("already runs this flow run" in line for line in other.lines), "the line")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")
        assert bench.job(run).count(";") == 0

    play(bench, scene)


def test_a_controller_that_is_away_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RETRY_S", 2.0)
    bench.cluster.kill("slurmctld")

    async def scene(worker: Worker, run: FlowRun, group: Any) -> None:
        await bench.until(lambda: any("trying again" in line for line in worker.lines), "the line")
        bench.cluster.run("slurmctld", "-D")
        await bench.until(lambda: bench.prefect.state(run.id) == S.RUNNING, "its start")
        bench.finish(run)
        await bench.until(lambda: bench.job(run).endswith("COMPLETED"), "its end")

    assert sum("trying again" in line for line in play(bench, scene).lines) == 1
