"""Shards over a Ray cluster of this machine: the files of one process, to the byte; what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.prefect_server import free_port, is_open
from grpo.config.jobs import SampleJob
from grpo.sampling.job import Worker, gpus_of_actor
from grpo.sampling.progress import Progress
from tests.grpo.sampling.test_job import job
from tests.support.job_runner import ENVIRONMENT, ROOT, metrics, result, run, wait_until

HERE = {"address": None, "workers": 2, "cpus": 0.5}


def with_ray(path, ray):
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "ray": ray}))
    return path


@pytest.fixture(params=["started by the job", "by its address"])
def address(request, monkeypatch):
    """Of a Ray cluster on this machine; None: the job starts one."""
    ray = pytest.importorskip("ray")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(ray.__file__).parents[1])]))
    # A job's own cluster leaves a token, with which Ray 2.60 starts others, and which its clients do not send.
    monkeypatch.setitem(ENVIRONMENT, "RAY_AUTH_MODE", "disabled")
    if request.param == "started by the job":
        yield None
        return
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as cluster:
        wait_until(lambda: is_open(port))
        yield f"127.0.0.1:{port}"
        cluster.terminate()  # it stops what it started


@pytest.mark.slow
def test_the_shards_are_those_of_one_process(address, tmp_path):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    run(job(alone))
    run(with_ray(job(spread), {**HERE, "address": address}), timeout=300)
    shards = sorted((alone / "out" / "sums").iterdir())
    assert len(shards) == 3
    assert [p.name for p in sorted((spread / "out" / "sums").iterdir())] == [p.name for p in shards]
    for shard in shards:
        assert (spread / "out" / "sums" / shard.name).read_bytes() == shard.read_bytes()
    assert result(spread)["steps_completed"] == 40
    assert metrics(spread)[-1]["tokens_so_far"] == metrics(alone)[-1]["tokens_so_far"]


@pytest.mark.slow
def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    done = run(with_ray(job(tmp_path), {**HERE, "address": "127.0.0.1:1"}), expected=2)
    assert "ray.address: no Ray cluster at '127.0.0.1:1'" in done.stderr.splitlines()[-1]


def test_ray_and_processes_exclude_each_other(tmp_path):
    path = with_ray(job(tmp_path), HERE)
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "hardware": {"device": "cpu", "processes": 2}}))
    assert "leave hardware.processes and hardware.nodes at 1" in run(path, expected=2).stderr


@pytest.mark.parametrize(
    ("engine", "hardware", "ray", "gpus"),
    [
        (None, {}, {}, 1),
        (None, {"device": "cpu"}, {}, 0),
        ({"kind": "local", "tensor_parallel_size": 4}, {}, {}, 4),
        ({"kind": "server"}, {}, {}, 0),
        ({"kind": "endpoint", "base_url": "http://a/v1", "model": "m"}, {}, {}, 0),
        (None, {}, {"gpus": 0.5}, 0.5),
    ],
)
def test_an_actor_gets_the_gpus_that_its_engine_runs_on(engine, hardware, ray, gpus, tmp_path):
    settings = json.loads(job(tmp_path).read_text())
    settings |= {"hardware": hardware, "ray": ray, "tasks": [{**settings["tasks"][0], "engine": engine}]}
    of = SampleJob.model_validate(settings)
    assert gpus_of_actor(of) == gpus
    if engine and engine["kind"] == "local":
        assert Progress(of, [], None, 3).devices == 3 * gpus  # for device-hours


def test_actors_share_the_judges_budget(tmp_path):
    """100 requests among 3 of them."""
    judge = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m", "budget_requests": 100}
    settings = json.loads(job(tmp_path).read_text()) | {"ray": {"workers": 3}, "judge": judge}
    of = SampleJob.model_validate(settings)
    worker = Worker(of, Progress(of, [], None, of.ray.workers))
    (scorer := worker._make_scorer(of.tasks[0])).close()
    assert scorer.judge.voter.model._requests_max == 33
