"""Runs jobs as they are really run, each in a process of its own, and kills some.

Jobs of one process are forks of a fork server, as those of recipes on a CPU are: loading torch and transformers takes
longer than most of these jobs. All others are ``python -m grpo.train job.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import load_file

from grpo.errors import InputError
from grpo.rl.trainer import train_rl
from grpo.train import read_job
from grpo.training.sft import train_sft
from tasks.trainer.fork_client import ForkedTrainer, ForkServer

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "grpo.train"]
CPU = {"device": "cpu"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT.pop("R1FLOW_PARENT_PID", None)


def write_job(folder: Path, kind: str, **fields) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: str(folder / name) for name in ("out", "state")}
    job = {"kind": kind, **own, "metrics": str(folder / "metrics.jsonl"), "result": str(folder / "result.json")}
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "seed": 0, **fields}, default=str))
    return path


def run(path: Path, expected: int = 0, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end. What a fork prints is all in `stderr`."""
    if _may_be_fork(path):
        with tempfile.TemporaryFile() as log:
            code = _fork(path, log).wait(timeout)
            done = subprocess.CompletedProcess([*COMMAND, path], code, "", _printed(log))
    else:
        done = subprocess.run(
            [*COMMAND, path], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
        )
    assert done.returncode == expected, done.stderr
    return done


def _may_be_fork(path: Path) -> bool:
    try:
        where = read_job(path).where
    except InputError:
        return True
    return where.processes * where.nodes == 1 and where.trainer is None


@cache
def _fork_server() -> ForkServer:
    """The fork server of this process, which ends with it."""
    with contextlib.chdir(ROOT):
        return ForkServer(ENVIRONMENT)


def _fork(path: Path, log: IO[bytes]) -> ForkedTrainer:
    return _fork_server().fork([str(path)], log, ENVIRONMENT, [])


def _printed(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode()


def run_here(path: Path) -> None:
    """As `run`, without the seconds that a process of its own needs to load torch."""
    job = read_job(path)
    for folder in (job.out, job.state):
        folder.mkdir(parents=True, exist_ok=True)
    {"rl": train_rl, "sft": train_sft}[job.kind](job)


def start_on_two_machines(path: Path, meeting: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """Starts the job as two machines do that meet there, the second one first."""
    return [
        subprocess.Popen(
            [*COMMAND, path],
            cwd=ROOT,
            env=ENVIRONMENT | meeting | {"PET_NODE_RANK": str(number)},
            stdout=subprocess.DEVNULL,
        )
        for number in (1, 0)
    ]


def kill_at(path: Path, step: int, timeout: float = 600) -> None:
    """Start the job and kill it once `step` stands in its metrics."""
    with tempfile.TemporaryFile() as log:
        process: subprocess.Popen[bytes] | ForkedTrainer
        if _may_be_fork(path):
            process = _fork(path, log)
        else:
            process = subprocess.Popen([*COMMAND, path], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)
        try:
            wait_until(lambda: process.poll() is not None or len(metrics(path.parent)) >= step, timeout)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL, _printed(log)
    assert not (path.parent / "result.json").exists()


def wait_until(condition, timeout: float = 600) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def metrics(folder: Path) -> list[dict]:
    """The complete lines."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in metrics(folder)]


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def marked(*variables: str) -> list[int]:
    """Processes that have all these variables, as "NAME=value", in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if {variable.encode() for variable in variables} <= {*path.read_bytes().split(b"\0")}:
                found.append(int(path.parent.name))
    return found


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PRETRAIN = {
    "vocabulary": 300,
    "hidden": 32,
    "feed_forward": 64,
    "layers": 2,
    "heads": 2,
    "context": 128,
    "batch_size": 4,
    "steps": 30,
    "optimizer": {"learning_rate": 0.01, "warmup_steps": 3},
    "hardware": CPU,
}
SFT = {
    "epochs": 10,
    "batch_size": 8,
    "micro_batch_tokens": 128,
    "max_tokens": 64,
    "optimizer": {"learning_rate": 0.01, "final_learning_rate_share": 0.1},
    "hardware": CPU,
    "save_every": 10,
}
RL = {
    "steps": 40,
    "prompts_per_step": 2,
    "group_size": 4,
    "minibatches": 2,
    "clip_eps_low": 10,
    "clip_eps_high": 10,
    "kl_coef": 0.01,
    "reference_refresh_steps": 5,
    "sampling": {"max_new_tokens": 10, "batch_size": 16},
    "micro_batch_tokens": 128,
    "optimizer": {"learning_rate": 0.003},
    "hardware": CPU,
    "save_every": 6,
    "samples_every": 10,
}
