"""Slurm's commands: `sbatch`, `squeue`, `sacct`, `scancel`, and what they print."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from grpo.errors import InputError

COMMENT = "r1flow:"
"""Start of a job's comment. The id of its flow run follows."""
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
        "UNKNOWN",
    }
)
"""States that a job does not leave. UNKNOWN is ours: Slurm has no record of the job any more."""
COMMAND_S = 100.0
"""Seconds that a command may take. Slurm's own commands try for some 10 s to reach the controller."""

# A column is cut at its width. The widths are those of the longest values that can occur in the columns that we parse.
_COLUMNS = {"JobID": 20, "State": 20, "exit_code": 12, "RestartCnt": 8, "NodeList": 60, "Reason": 60, "Comment": 80}
_TEMPORARY = re.compile(
    r"unable to contact|connect failure|connection refused|timed out|temporarily|try again|"
    r"communication connection failure|submit limit|not responding|backup controller",
    re.IGNORECASE,
)


class SlurmUnavailable(Exception):
    """Slurm did not answer, or accepts no more jobs for now. The same command may succeed later."""


@dataclass(frozen=True)
class SlurmJob:
    """One job as Slurm describes it. `exit_code` is that of the batch script, `signal` the one that ended it or 0."""

    id: int
    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    restarts: int = 0
    nodes: str = ""
    run_id: UUID | None = None

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue, for the first time or after a requeue, and no process of it runs."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")


def queue_command() -> list[str]:
    """The `squeue` command for all jobs of this user, with those that ended recently (MinJobAge of the cluster)."""
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
    return ["squeue", "--me", "--noheader", "--states=all", f"--Format={columns}"]


def parse_queue(text: str) -> list[SlurmJob]:
    """The jobs in the output of `queue_command`, one line per job with columns of fixed width."""
    jobs = []
    for line in text.splitlines():
        values, start = {}, 0
        for name, width in _COLUMNS.items():
            values[name], start = line[start : start + width].strip(), start + width
        if not values["JobID"].isdecimal():  # an element of an array that somebody else submitted, or a blank line
            continue
        status = int(values["exit_code"] or 0)
        jobs.append(
            SlurmJob(
                id=int(values["JobID"]),
                state=values["State"],
                reason=values["Reason"],
                exit_code=status >> 8,
                signal=status & 0x7F,
                restarts=int(values["RestartCnt"] or 0),
                nodes=values["NodeList"],
                run_id=_run_id(values["Comment"]),
            )
        )
    return jobs


def parse_accounting(job_id: int, text: str) -> SlurmJob | None:
    """The job in the output of `sacct --parsable2 --format=State,ExitCode`; None if it has no such job."""
    match = re.match(r"([A-Z_]+)(?: by \d+)?\+?\|(\d+):(\d+)", text.strip())
    return SlurmJob(job_id, match[1], exit_code=int(match[2]), signal=int(match[3])) if match else None


def _run_id(comment: str) -> UUID | None:
    try:
        return UUID(comment.removeprefix(COMMENT)) if comment.startswith(COMMENT) else None
    except ValueError:
        return None


@dataclass
class SlurmQueue:
    """This user's jobs. One listing serves all callers for `max_age_s` seconds, to spare the controller."""

    max_age_s: float = 4.0
    _jobs: list[SlurmJob] = field(default_factory=list)
    _listed: float | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def jobs(self, *, fresh: bool = False) -> list[SlurmJob]:
        """All jobs of this user that Slurm still lists, the oldest first. `fresh`: listed after this call began.

        Raises:
            SlurmUnavailable: the controller did not answer.
            InputError: `squeue` is not installed, or refused the request.
        """
        asked = time.monotonic()
        async with self._lock:
            if self._listed is None or self._listed < (asked if fresh else asked - self.max_age_s):
                began = time.monotonic()
                self._jobs = sorted(parse_queue(await run_command(queue_command())), key=lambda job: job.id)
                self._listed = began
            return self._jobs

    async def job(self, job_id: int, *, fresh: bool = False) -> SlurmJob:
        """One job, from `squeue` or else from accounting; in state UNKNOWN if neither has it."""
        for job in await self.jobs(fresh=fresh):
            if job.id == job_id:
                return job
        try:
            query = ["sacct", f"--jobs={job_id}", "--noheader", "--parsable2", "--allocations"]
            found = parse_accounting(job_id, await run_command([*query, "--format=State,ExitCode"]))
        except (InputError, SlurmUnavailable):  # most small clusters have no accounting
            found = None
        return found if found is not None and found.is_ended else SlurmJob(job_id, "UNKNOWN")

    async def active_job(self, run_id: UUID, *, fresh: bool = False) -> SlurmJob | None:
        """The newest job of a flow run that has not ended."""
        jobs = [job for job in await self.jobs(fresh=fresh) if job.run_id == run_id and not job.is_ended]
        return jobs[-1] if jobs else None

    async def submit(self, options: Sequence[str], script: str, environment: Mapping[str, str], run_id: UUID) -> int:
        """Submits a script with `sbatch` and returns the job's id. The job inherits `environment`.

        Raises:
            SlurmUnavailable: the controller did not answer and has no job of this flow run.
            InputError: `sbatch` refused the job; the message is its own.
        """
        command = ["sbatch", "--parsable", f"--comment={COMMENT}{run_id}", "--export=ALL", *options]
        try:
            answer = await run_command(command, stdin=script, environment=environment)
        except SlurmUnavailable:
            # The answer may be lost although the job was accepted.
            if (job := await self.active_job(run_id, fresh=True)) is not None:
                return job.id
            raise
        self._listed = None
        return int(answer.strip().partition(";")[0])

    async def cancel(self, job_id: int) -> None:
        """Cancels a job with `scancel`. A running one gets SIGTERM, and SIGKILL after the cluster's KillWait."""
        await run_command(["scancel", str(job_id)])
        self._listed = None


async def run_command(
    command: Sequence[str], *, stdin: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Runs one of Slurm's commands and returns its standard output.

    Raises:
        SlurmUnavailable: it did not reach the controller, or did not end within COMMAND_S seconds.
        InputError: it is not installed, or failed for another reason; one line.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ if environment is None else environment),
        )
    except FileNotFoundError:
        raise InputError(
            f"{command[0]} is not installed here; start the worker on a machine from which jobs are submitted"
        ) from None
    try:
        output, errors = await asyncio.wait_for(
            process.communicate(None if stdin is None else stdin.encode()), timeout=COMMAND_S
        )
    except BaseException as error:
        if process.returncode is None:
            process.kill()
        if isinstance(error, TimeoutError):
            raise SlurmUnavailable(f"{command[0]} did not end within {COMMAND_S:g} s") from None
        raise
    if process.returncode:
        text = errors.decode(errors="replace")
        lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        message = lines[-1] if lines else f"exit code {process.returncode}"
        message = re.sub(rf"^{command[0]}: (error: )?", "", message)
        raise (SlurmUnavailable if _TEMPORARY.search(text) else InputError)(f"{command[0]}: {message}")
    return output.decode(errors="replace")
