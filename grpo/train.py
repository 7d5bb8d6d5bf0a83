"""Runs one job: ``python -m grpo.train [--processes N] [--nodes M] job.json``, or under your own torchrun, ``torchrun
... -m grpo.train job.json``.

On several machines, run the same command on each. PET_RDZV_ENDPOINT, one of torchrun's PET_ variables, names their
rendezvous.

Exit codes: 0 done, 2 bad input (the last line of stderr says what), else a failure with a traceback.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from grpo.config.jobs import JOBS, JobBase
from grpo.distributed.rendezvous import ENDPOINT, meeting_place
from grpo.errors import InputError, TrainingStopped
from grpo.processes.exhausted import is_full, says_full
from grpo.processes.lifetime import ENDS_WITH_PARENT, be_killed_first, die_with_parent, write_whole_lines
from grpo.processes.loading import limited_loading, never_collected
from grpo.processes.notices import warnings_as_notices
from grpo.processes.peak_memory import MemoryUsed
from grpo.secret_values import secret_in

RUNNERS = {
    "pretrain": "grpo.training.pretrain:pretrain",
    "sft": "grpo.training.sft:train_sft",
    "reward_model": "grpo.training.reward_model:train_reward_model",
    "step_labels": "grpo.training.step_labels:run_step_labels",
    "process_reward_model": "grpo.training.process_reward_model:train_process_reward_model",
    "rl": "grpo.rl.trainer:train_rl",
    "sample": "grpo.sampling.job:run_sampling",
    "copy_model": "grpo.training.copy_model:copy_model",
}
"""Kind of job -> "module:function". Names instead of imports, so that a sampling job need not load the training
code."""
TRAINERS = {"verl": {"sft": "grpo.trainers.verl.sft:train_sft", "rl": "grpo.trainers.verl.rl:train_rl"}}
"""`hardware.trainer.kind` -> its own RUNNERS. They start the processes of their engine themselves."""
LOST_S = 20.0
"""Seconds that a process waits after losing a peer. torchrun blames the first process that ends and stops the others
within a second, so the process at fault must end first. If it ran on another machine, only we can end this one."""
OOM_POINTS = 100
"""Thousandths of the memory by which the kernel takes a trainer for larger when memory runs out: the flow that started
it should live and say so."""
_WORKER = "LOCAL_RANK" in os.environ
"""Whether torchrun started this process."""


def read_job(path: Path) -> JobBase:
    """Reads the typed job in a JSON file. Raises InputError for unknown kinds, keys and values out of range."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read the job: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in JOBS:
        raise InputError(f"{path}: kind is {kind!r}; it must be one of {', '.join(JOBS)}")
    if secret := secret_in(raw):
        raise InputError(f"{path}: {secret}")
    try:
        return JOBS[kind].model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def main(arguments: list[str]) -> int:
    """Runs the job of a job file. Returns the exit code."""
    args = parser().parse_args(arguments)
    _die_with_parent()
    try:
        job = read_job(args.job)
        processes, nodes = args.processes or job.where.processes, args.nodes or job.where.nodes
        if processes * nodes > 1 and not _WORKER and job.where.trainer is None:
            return start(args.job, processes, nodes)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(job)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m grpo.train", description="Run one job; grpo/config/jobs.py lists the fields."
    )
    top.add_argument("--processes", type=_count, metavar="N", help="on each machine; else the job's hardware says it")
    top.add_argument("--nodes", type=_count, metavar="M", help="machines; else the job's hardware says it")
    top.add_argument("job", type=Path)
    return top


def start(job: Path, processes: int, nodes: int) -> int:
    """Runs the job with torchrun in `processes` processes here, and as many on each other machine.

    torchrun runs in this process, so that it dies with this process's parent; its workers die with torchrun.
    """
    meeting = ["--standalone"] if nodes == 1 else ["--rdzv-backend", "c10d"]
    if nodes > 1:
        meeting_place(nodes)  # torchrun reads it itself
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.run import main as torchrun

    counts, place = ["--nnodes", str(nodes), "--nproc-per-node", str(processes)], os.environ.get(ENDPOINT)
    try:
        torchrun([*meeting, *counts, "-m", "grpo.train", str(job)])
    except RendezvousConnectionError:
        print(
            f"error: nothing answers at {place}: the machine that it names is gone, or not there yet", file=sys.stderr
        )
        return 1
    except RendezvousTimeoutError:
        print(f"error: not all of {nodes} machines came to {place} within 10 minutes", file=sys.stderr)
        return 1
    return 0


def run(job: JobBase) -> int:
    """Runs the job in this process, as one of its processes."""
    try:
        for folder in (job.out, job.state):
            folder.mkdir(parents=True, exist_ok=True)
        runners = RUNNERS if job.where.trainer is None else TRAINERS[job.where.trainer.kind]
        module, function = runners[job.kind].split(":")  # type: ignore[attr-defined]
        with limited_loading(), never_collected():
            runner = getattr(importlib.import_module(module), function)
        used = MemoryUsed()
        with warnings_as_notices():
            runner(job)
        if job.where.trainer is None:  # another trainer's processes hold the memory
            used.write(job.result.parent)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingStopped as stopped:
        print(f"error: training stopped: {stopped}", file=sys.stderr)
        return 1
    except Exception as error:
        from grpo.distributed.process_group import is_peer_failure

        if is_peer_failure(error):
            time.sleep(LOST_S)
            print("error: a process on another machine is gone; the trainer's log there says why", file=sys.stderr)
            return 1
        if type(error).__name__ == "OutOfMemoryError":  # torch's; a job without torch must not load it
            from grpo.training.out_of_memory import out_of_memory

            print(f"error: {out_of_memory(str(error))}", file=sys.stderr)
            return 1
        # By now the library that failed may have removed what it had written, so check the message, too.
        if not (says_full(error) or is_full(job.out)):
            raise
        print(f"error: no space left on {job.out}: free some or write elsewhere", file=sys.stderr)
        return 2
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _die_with_parent() -> None:
    """Makes the kernel send SIGKILL when the parent dies, so that no trainer outlives a killed flow, and no worker its
    torchrun."""
    parent = os.environ.get("R1FLOW_PARENT_PID")
    if (parent is None and not _WORKER) or sys.platform != "linux":
        return
    be_killed_first(OOM_POINTS)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if parent is not None and os.getppid() != int(parent) and not _WORKER:
        os._exit(1)  # the parent died before prctl took effect


if __name__ == "__mp_main__" and ENDS_WITH_PARENT in os.environ:
    die_with_parent(os.getppid())

if __name__ == "__main__":
    if _WORKER:
        write_whole_lines()
    code = main(sys.argv[1:])
    if _WORKER:
        # Torch's threads sometimes abort Python's shutdown, and torchrun would report a finished job as failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
