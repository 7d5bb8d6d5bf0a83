"""What the state of a job means for its flow run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect.client.schemas.objects import StateType

from flows.installation.slurm.job import GAVE_UP, NOT_REQUEUED
from flows.installation.slurm.queue import SlurmJob

CANCEL_S = 90.0
"""Seconds that a running job has to end by itself after its flow run was cancelled: the flow notices within 10 s, its
trainer has 20 s for a checkpoint, Prefect allows 30 s in total."""
LINGER_S = 300.0
"""Seconds that a job may run on after its flow run has ended."""
_DONE = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
_LOST = {
    "NODE_FAIL": "lost its node",
    "BOOT_FAIL": "could not start its node",
    "PREEMPTED": "was preempted",
    "REVOKED": "was revoked",
}
_FAULTS = {
    "OUT_OF_MEMORY": "ran out of memory; raise the variable memory",
    "TIMEOUT": "ran into its time limit before it had stopped; raise the variables time or stop_before_end_s",
    "DEADLINE": "reached its deadline",
    "UNKNOWN": "is no longer known to Slurm, and its flow run did not end",
}


@dataclass(frozen=True)
class JobOutcome:
    """What to do. `again` and `crashed` and `cancelled`: set this state of the flow run; `scancel`: end the job."""

    action: Literal["wait", "done", "again", "crashed", "cancelled", "scancel"]
    message: str = ""


def outcome(
    job: SlurmJob, run_state: StateType, *, cancelling_s: float | None, ended_s: float | None, log: Path
) -> JobOutcome:
    """The outcome of a job, given the state of its flow run.

    `cancelling_s`: seconds since the flow run was first seen Cancelling, None if it never was. `ended_s`: the same for
    its final state. The job has to be listed after `run_state` was read: a job that waits then has no process.
    """
    if job.is_ended:
        return _ended(job, run_state, cancelling_s is not None, log)
    if job.is_waiting:
        if run_state in (*_DONE, StateType.CANCELLING) or cancelling_s is not None:
            return JobOutcome("scancel", f"Slurm job {job.id} is removed from the queue: its flow run needs it no more")
        if run_state == StateType.RUNNING:
            return JobOutcome("again", f"Slurm queued job {job.id} again ({job.reason or job.state}).")
    elif (cancelling_s or 0.0) > CANCEL_S:
        return JobOutcome("scancel", f"Slurm job {job.id} did not end within {CANCEL_S:g} s of the cancellation")
    elif (ended_s or 0.0) > LINGER_S:
        return JobOutcome("scancel", f"Slurm job {job.id} still ran {LINGER_S:g} s after its flow run had ended")
    return JobOutcome("wait")


def _ended(job: SlurmJob, run_state: StateType, cancelling: bool, log: Path) -> JobOutcome:
    name = f"Slurm job {job.id}" + (f" on {job.nodes}" if job.nodes else "")
    if run_state in (StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.PAUSED):
        return JobOutcome("done")
    if cancelling or run_state == StateType.CANCELLING:
        return JobOutcome("cancelled", f"{name} was cancelled.")
    if job.state == "CANCELLED":  # by a person or an administrator, who does not expect it back
        return JobOutcome("cancelled", f"{name} was cancelled with scancel.")
    if job.state == "FAILED" and job.exit_code == GAVE_UP:
        return JobOutcome(
            "crashed", f"{name} reached its time limit max_requeues times; raise the variable time. {log}"
        )
    if run_state in (StateType.CRASHED, StateType.SCHEDULED):  # Scheduled: the worker submits a job for its next start
        return JobOutcome("done")
    if job.state in _LOST:
        return JobOutcome("again", f"{name} {_LOST[job.state]}.")
    if job.state == "FAILED" and job.exit_code == NOT_REQUEUED:
        return JobOutcome("again", f"{name} stopped for its time limit.")
    if job.state in _FAULTS:
        return JobOutcome("crashed", f"{name} {_FAULTS[job.state]}. {log}")
    how = f"signal {job.signal}" if job.signal else f"exit code {job.exit_code}"
    return JobOutcome("crashed", f"{name} ended ({job.state}, {how}), and its flow run did not. {log}")
