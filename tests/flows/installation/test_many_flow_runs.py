"""Flow runs that a sweep looks at: all of them, in however many pages the server hands them out."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, StateType

from flows.installation.orphans import runs_in
from flows.installation.slurm.queue import SlurmQueue
from flows.installation.slurm.worker import SlurmWorker

RUNS = [FlowRun(id=uuid4(), name=f"run {number}", flow_id=uuid4(), infrastructure_pid="7") for number in range(201)]


class Server:
    """Prefect's, with 201 flow runs, of which it returns 200 at most."""

    def read_flow_runs(self, *, offset: int = 0, **_: Any) -> list[FlowRun]:
        return RUNS[offset : offset + 200]


class AsyncServer(Server):
    async def read_flow_runs(self, **asked: Any) -> list[FlowRun]:  # type: ignore[override]
        return super().read_flow_runs(**asked)


def test_more_flow_runs_than_a_page_holds() -> None:
    client: Any = Server()
    assert runs_in(client, [StateType.RUNNING]) == RUNS


def test_a_worker_takes_up_more_jobs_than_a_page_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_jobs(queue: SlurmQueue, fresh: bool) -> list[Any]:
        return []

    taken: list[UUID] = []
    monkeypatch.setattr(SlurmQueue, "jobs", no_jobs)
    monkeypatch.setattr(SlurmWorker, "_take_up", lambda worker, run, job_id: taken.append(run.id))
    worker = SlurmWorker(work_pool_name="r1-gpu")
    worker._client = AsyncServer()  # type: ignore[assignment]
    asyncio.run(worker._sweep())
    assert taken == [run.id for run in RUNS]
