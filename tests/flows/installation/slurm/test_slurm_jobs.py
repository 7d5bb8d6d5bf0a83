"""Flow runs as jobs of a real Slurm cluster on this machine, with a real Prefect server and worker: a stage that trains
is submitted, cancelled, stopped by its time limit, requeued, and its worker killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support import prefect_server
from tests.support.prefect_server import Server
from tests.support.r1 import R1
from tests.support.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = [pytest.mark.slow, needs_slurm]

DEADLINE_S = 3600.0
SMALL = {"hidden": 48, "feed_forward": 144, "save_every": 1000}
"""A checkpoint is written when a trainer is told to stop, or at its end."""


class SlurmInstallation(R1):
    """A Prefect server, a Slurm cluster, pools of type slurm, and one worker for stages that train."""

    def __init__(self, home: Path, cluster: SlurmCluster, server: Server):
        super().__init__(home)
        self.cluster, self.server = cluster, server
        self.worker: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        ours = {"PREFECT_API_URL": self.server.url, "PREFECT_HOME": str(self.home / "prefect"), "OMP_NUM_THREADS": "1"}
        return {**super().environment(), **ours, **self.cluster.environment}

    def start_worker(self) -> None:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "r1-gpu", "--install-policy", "never"]
        with (self.home / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill_worker(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait()

    def start(self, seed: int, steps: int, nodes: int = 1, **job_variables: Any) -> str:
        """Trigger the stage `base` on as many nodes; the id of its flow run."""
        deployment = self.server.ask("GET", "/deployments/name/base/base")
        form = deployment["parameters"]
        pretrain = {**form["config"]["pretrain"], **SMALL, "steps": steps, "hardware": {"nodes": nodes}}
        pretrain["optimizer"] |= {"kind": "adamw"}  # Muon, as in tiny, is for one process
        parameters = {**form, "config": {**form["config"], "documents": 6000, "pretrain": pretrain}, "seed": seed}
        body = {"parameters": parameters, "job_variables": {"gpus": 0, "cpus": 1, "nodes": nodes, **job_variables}}
        return self.server.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", **body)["id"]

    def state(self, id: str) -> str:
        return self.server.ask("GET", f"/flow_runs/{id}")["state"]["name"]

    def cancel(self, id: str) -> None:
        self.server.ask("POST", f"/flow_runs/{id}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})

    def jobs(self, id: str) -> list[dict[str, str]]:
        """Slurm's jobs of a flow run, the oldest first."""
        listed = self.cluster.ask("squeue", "--noheader", "--states=all", "--format=%A|%T|%k")
        rows = [line.split("|") for line in listed.splitlines()]
        return [{"id": number, "state": state} for number, state, comment in rows if comment == f"r1flow:{id}"][::-1]

    def job(self, id: str) -> dict[str, str]:
        (job,) = self.jobs(id)
        return job

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if value := found():
                    return value
            assert time.monotonic() < deadline, f"{what} did not come\n{self.logs()}"
            time.sleep(0.5)

    def wait_for(self, id: str, *names: str) -> None:
        self.wait(lambda: self.state(id) in names, f"flow run {id} in {names}")

    def steps(self, seed: int) -> int:
        """Last step that the trainer of a seed's stage has logged."""
        files = [path / "trainer/metrics.jsonl" for path in self.work(seed)]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return max((int(match[1]) for line in lines if (match := re.search(r'"step": (\d+)', line))), default=0)

    def work(self, seed: int) -> list[Path]:
        jobs = self.home.glob("work/base-*/trainer/job.json")
        return [job.parents[1] for job in jobs if f'"seed": {seed},' in job.read_text()]

    def checkpoints(self, seed: int) -> list[Path]:
        return [found for path in self.work(seed) for found in path.glob("state/trainer/step-*")]

    def messages(self, id: str) -> str:
        """The lines of a flow run's log."""
        rows = self.server.ask("POST", "/logs/filter", logs={"flow_run_id": {"any_": [id]}}, sort="TIMESTAMP_ASC")
        return "\n".join(row["message"] for row in rows)

    def logs(self) -> str:
        paths = [self.home / "worker.log", *self.home.glob("logs/slurm/*.log")]
        ends = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in paths if path.exists()]
        return "\n".join([*ends, self.cluster.ask("squeue", "--states=all"), self.cluster.logs()])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmInstallation]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("prefect-server", "home"):
        (folder / name).mkdir()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(prefect_server, "DEADLINE_S", DEADLINE_S)  # a busy machine needs long to start one
    server = Server(folder / "prefect-server")
    with slurm_cluster(folder / "cluster") as cluster:
        installation = SlurmInstallation(folder / "home", cluster, server)
        try:
            server.start()
            done = installation("deploy", "--pools", "slurm", "--yes")
            assert done.returncode == 0, done.stderr[-3000:]
            installation.start_worker()
            yield installation
        finally:
            if installation.worker is not None:
                installation.worker.kill()
                installation.worker.wait()
            server.stop()
            monkeypatch.undo()


def test_a_stage_runs_as_a_job(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=1, steps=20, name='it\'s $(a) `job`; "of" seed 1')
    slurm.wait_for(run, "Completed")
    slurm.wait(lambda: slurm.job(run)["state"] == "COMPLETED", "the end of its job")
    number = slurm.job(run)["id"]
    named = slurm.cluster.ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%j")
    assert named == "it_s __a_ _job__ _of_ seed 1"
    assert slurm.server.ask("GET", f"/flow_runs/{run}")["infrastructure_pid"] == number
    said = slurm.messages(run)
    assert f"submitted as Slurm job {number}" in said and "runs on n" in said


def test_a_job_that_slurm_refuses_is_one_line(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=2, steps=20, partition="no such; partition")
    slurm.wait_for(run, "Crashed")
    message = slurm.server.ask("GET", f"/flow_runs/{run}")["state"]["message"]
    assert message.endswith("InputError: sbatch: Batch job submission failed: Invalid partition name specified")
    assert not slurm.jobs(run)


def test_cancelling_writes_a_checkpoint(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=3, steps=100_000)
    slurm.wait(lambda: slurm.steps(3) >= 5, "its first steps")
    slurm.cancel(run)
    slurm.wait_for(run, "Cancelled")
    slurm.wait(lambda: slurm.job(run)["state"] in ("COMPLETED", "FAILED", "CANCELLED"), "the end of its job")
    assert slurm.checkpoints(3)
    assert slurm.state(run) == "Cancelled"


def test_scancel_cancels_the_flow_run(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=4, steps=100_000)
    slurm.wait(lambda: slurm.steps(4) >= 5, "its first steps")
    slurm.cluster.ask("scancel", slurm.job(run)["id"])
    slurm.wait_for(run, "Cancelled")
    time.sleep(20)  # nobody starts it again
    assert (slurm.state(run), slurm.job(run)["state"]) == ("Cancelled", "CANCELLED")
    assert slurm.checkpoints(4)


def test_a_waiting_job_says_why_and_is_cancelled(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=5, steps=20, partition="empty")
    slurm.wait(lambda: "waits: PartitionDown" in slurm.messages(run), "the reason")
    assert slurm.messages(run).count("waits: PartitionDown") == 1
    slurm.cancel(run)
    slurm.wait_for(run, "Cancelled")
    slurm.wait(lambda: slurm.job(run)["state"] == "CANCELLED", "the end of its job")


def test_the_time_limit_writes_a_checkpoint_and_the_job_continues(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=6, steps=100_000, time="1:00:00", stop_before_end_s=60)
    slurm.wait(lambda: slurm.steps(6) >= 5, "its first steps")
    number = slurm.job(run)["id"]
    used = slurm.cluster.ask("squeue", "--noheader", f"--jobs={number}", "--format=%M").split(":")
    # A busy machine takes minutes to the first step, so the limit is set when they are known. Slurm counts minutes.
    slurm.cluster.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={int(used[-2]) + 2}")
    slurm.wait_for(run, "AwaitingRetry")  # said before the flow has ended
    slurm.wait(lambda: slurm.checkpoints(6), "its checkpoint")
    reached = slurm.steps(6)
    slurm.wait(lambda: slurm.job(run)["state"] == "PENDING", "the requeue")
    slurm.wait(lambda: slurm.steps(6) > reached, "steps after the requeue")
    assert slurm.state(run) == "Running"
    assert "start 2" in slurm.wait(lambda: slurm.messages(run), "lines")
    slurm.cancel(run)
    slurm.wait_for(run, "Cancelled")


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_worker_that_dies_finds_its_jobs_again(slurm: SlurmInstallation, signal_number: signal.Signals) -> None:
    seed = 10 + signal_number
    run = slurm.start(seed=seed, steps=600)
    slurm.wait(lambda: slurm.steps(seed) >= 5, "its first steps")
    assert slurm.worker is not None
    os.kill(slurm.worker.pid, signal_number)
    slurm.worker.wait(timeout=60)
    assert slurm.job(run)["state"] == "RUNNING"
    slurm.start_worker()
    slurm.wait_for(run, "Completed")
    assert slurm.job(run)["state"] in ("COMPLETING", "COMPLETED", "RUNNING")
    assert f"follows Slurm job {slurm.job(run)['id']}" in slurm.messages(run)


def kill_processes_of(job: str) -> None:
    """Kills all of a job's processes, its script too, as the kernel does; `scancel` would cancel it."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job:
                process.kill()


def test_a_job_that_ended_while_no_worker_ran(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=40, steps=100_000)
    slurm.wait(lambda: slurm.steps(40) >= 5, "its first steps")
    slurm.kill_worker()
    kill_processes_of(slurm.job(run)["id"])
    slurm.wait(lambda: slurm.job(run)["state"] == "FAILED", "the end of its job")
    slurm.start_worker()
    slurm.wait_for(run, "Crashed")
    assert "Slurm job" in slurm.server.ask("GET", f"/flow_runs/{run}")["state"]["message"]


def test_a_job_that_slurm_requeues_continues(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=41, steps=2000)
    slurm.wait(lambda: slurm.steps(41) >= 5, "its first steps")
    slurm.cluster.ask("scontrol", "requeue", slurm.job(run)["id"])
    slurm.wait_for(run, "AwaitingRetry")
    slurm.wait_for(run, "Completed")
    assert len(slurm.jobs(run)) == 1


def test_a_job_on_two_nodes_loses_one_and_continues(slurm: SlurmInstallation) -> None:
    run = slurm.start(seed=50, steps=60, nodes=2)
    slurm.wait(lambda: slurm.steps(50) >= 5, "its first steps")
    assert list(slurm.work(50)[0].glob("trainer/trainer-1.log"))  # the second node takes part
    slurm.cluster.kill("n1")
    slurm.cluster.ask("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=lost")
    slurm.wait_for(run, "AwaitingRetry")
    slurm.cluster.run("n1", "-D", "-N", "n1")
    slurm.cluster.ask("scontrol", "update", "NodeName=n1", "State=RESUME")
    slurm.wait_for(run, "Completed")
    assert len(slurm.jobs(run)) == 1
