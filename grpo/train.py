"""Run one job: ``python -m grpo.train [--processes N] job.json`` (or ``torchrun ... -m grpo.train job.json``).

Exit codes: 0 done, 2 bad input (the last line of stderr says what), else a failure with a traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from grpo.errors import InputError, TrainingStopped
from grpo.jobs import JOBS, JobBase

RUNNERS = {
    "pretrain": "grpo.pretrain:pretrain",
    "sft": "grpo.sft:train_sft",
    "reward_model": "grpo.reward_model:train_reward_model",
    "rl": "grpo.trainer:train_rl",
    "sample": "grpo.sampling:run_sampling",
    "copy_model": "grpo.policy:copy_model",
}
"""Named, not imported: a sampling job need not load what only training needs."""
FULL_BYTES = 2**20
"""A job that fails with less than this free failed for want of space."""


def read_job(path: Path) -> JobBase:
    """The typed job in a JSON file; unknown kinds, keys and values out of range are InputErrors."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read the job: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON: {error}") from None
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in JOBS:
        raise InputError(f"{path}: kind is {kind!r}; it must be one of {', '.join(JOBS)}")
    try:
        return JOBS[kind].model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def main(arguments: list[str]) -> int:
    processes = arguments[1] if len(arguments) == 3 and arguments[0] == "--processes" else "1"
    if len(arguments) not in (1, 3) or not processes.isdecimal():
        print("usage: python -m grpo.train [--processes N] job.json", file=sys.stderr)
        return 2
    _die_with_parent()
    if processes != "1":
        # In this process, so that torchrun too dies with who started it; its workers die with torchrun.
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", processes, "-m", "grpo.train", arguments[-1]])
        return 0
    try:
        job = read_job(Path(arguments[-1]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        for folder in (job.out, job.state):
            folder.mkdir(parents=True, exist_ok=True)
        module, function = RUNNERS[job.kind].split(":")  # type: ignore[attr-defined]
        getattr(importlib.import_module(module), function)(job)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingStopped as stopped:
        print(f"error: training stopped: {stopped}", file=sys.stderr)
        return 1
    except Exception as error:
        from grpo.parallel import lost_peer

        if lost_peer(error):
            time.sleep(60)  # torchrun stops us before; who ends first gets the blame
            return 1
        # Each library has its own words for a full disk, some of them none.
        if shutil.disk_usage(job.out).free > FULL_BYTES:
            raise
        print(f"error: no space left on {job.out}: free some or write elsewhere", file=sys.stderr)
        return 2
    return 0


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the launching process is gone, so that no trainer outlives a killed flow."""
    parent = os.environ.get("R1FLOW_PARENT_PID")
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent) and "LOCAL_RANK" not in os.environ:
        os._exit(1)  # it died before we asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
