"""Sampling jobs of several processes with a real vLLM: each has an engine of its own, and starts it when it likes."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from grpo.data.records import read_samples
from tests.grpo.sampling.test_job import problems
from tests.support.job_runner import CPU, ENVIRONMENT, ROOT, marked, result, wait_until, write_job
from tests.support.vllm_models import PYTHON, needs_vllm, tiny_llama
from tests.support.vllm_server import served

pytestmark = [pytest.mark.slow, needs_vllm]

QUIET = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
LOCAL = {"kind": "local", "enforce_eager": True, "kv_cache_gb": 0.25}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Three policies of one shape, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_llama(folder / f"model{seed}", tied=True, seed=seed) for seed in range(3)]


def job(folder: Path, models: list[str], engine: dict, processes: int, shards: int = 1) -> Path:
    """Each policy has shards of 4 problems."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = problems(folder / "problems.parquet", 4 * shards)
    tasks = [
        {
            "name": f"of{number}",
            "model": model,
            "policy": f"digest{number}",
            "problems": [rows],
            "samples_per_problem": 2,
            "sampling": {"max_new_tokens": 12},
            "engine": engine,
        }
        for number, model in enumerate(models)
    ]
    return write_job(folder, "sample", tasks=tasks, shard_size=4, hardware={**CPU, "processes": processes})


def start(path: Path, processes: int) -> subprocess.Popen[str]:
    """Processes of the job have its path as the variable R1FLOW_TEST."""
    command = [PYTHON, "-m", "grpo.train", "--processes", str(processes), path]
    environment = {**QUIET, "R1FLOW_TEST": str(path)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def run(path: Path, processes: int) -> None:
    with start(path, processes) as process:
        try:
            _, errors = process.communicate(timeout=400)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == 0, errors[-5000:]


def texts(folder: Path) -> dict[str, list[str]]:
    """Sampled texts by policy, in order."""
    return {
        task.name: [sample.completion for path in sorted(task.glob("*.parquet")) for sample in read_samples(path)]
        for task in sorted((folder / "out").iterdir())
    }


@pytest.fixture(scope="module")
def written(models, tmp_path_factory) -> dict[str, list[str]]:
    """What one process samples of two shards of each policy."""
    folder = tmp_path_factory.mktemp("alone")
    run(job(folder, models, LOCAL, 1, shards=2), 1)
    return texts(folder)


def test_engines_start_alone(models, written, tmp_path):
    """Three policies of a shard each and two processes: one starts an engine while the other has nothing to sample."""
    run(job(tmp_path, models, LOCAL, 2), 2)
    assert texts(tmp_path) == {name: of[:8] for name, of in written.items()}
    assert len({*map(tuple, written.values())}) == 3
    assert result(tmp_path)["steps_completed"] == 12


def test_a_server_has_the_weights_of_the_policy_that_is_sampled(models, written, tmp_path):
    """In both processes, which have a shard of each policy. Its batches may round some completions otherwise."""
    with served(models[0], tmp_path / "log") as (url, _):
        # Connecting waits for a server that is being started: ten attempts, 30 s apart at most.
        run(job(tmp_path / "job", models, {"kind": "server", "url": url, "retries": 10}, 2, shards=2), 2)
    for name, of in texts(tmp_path / "job").items():
        equal = sum(a == b for a, b in zip(of, written[name], strict=True))
        assert (len(of), equal >= 14) == (16, True)


def test_engines_end_with_a_process_that_is_killed(models, tmp_path):
    path = job(tmp_path, models, LOCAL, 2, shards=50)
    mark = f"R1FLOW_TEST={path}"
    process = start(path, 2)
    wait_until(lambda: len([*(tmp_path / "out").glob("*/*.parquet")]) >= 2, 300)
    assert len(marked(mark)) > 3
    process.kill()
    process.communicate()
    wait_until(lambda: not marked(mark), 20)
