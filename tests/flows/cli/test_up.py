"""`r1 up` and `r1 down`: what they say, what they start again, and that nothing is left."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from flows.cli import up
from flows.prefect_server import free_port
from grpo.errors import InputError
from tasks.tracking.database import make_database
from tests.support.installation import Installation, needs_postgres, postgres_installation
from tests.support.r1 import R1, ROOT


def test_down_without_an_installation_says_so(tmp_path: Path) -> None:
    done = R1(tmp_path)("down")
    assert (done.returncode, done.stderr.strip()) == (0, "nothing was running")


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = R1(tmp_path)("up", "--mlflow-port", port)
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: port {port} is in use on 127.0.0.1; choose another with --mlflow-port"
    assert not (tmp_path / "up.json").exists()


def test_postgres_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    if shutil.which("initdb") or any(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("it is there")
    done = R1(tmp_path)("up", "--postgres")
    assert done.returncode == 2 and done.stderr.startswith("error: --postgres needs initdb, which is not installed")


# In the supervisor's place. It has not said yet who it is.
STARTED = """
import json, os, time
with open(os.environ["R1FLOW_HOME"] + "/up.json", "w") as state:
    json.dump({"ready": True, "prefect": "http://127.0.0.1:4200/api", "tracking": "http://127.0.0.1:5000"}, state)
time.sleep(600)
"""


def test_of_two_at_the_same_moment_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "PYTHON", (sys.executable, "-c", STARTED))
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    args = argparse.Namespace(postgres=False, workers=1, prefect_port=free_port(), mlflow_port=free_port())
    args.postgres_port = 0
    try:
        assert up.run(args) == 0
        (first,) = up._marked(tmp_path)
        (tmp_path / "up.json").unlink()
        with pytest.raises(InputError, match="it is still starting"):
            up.run(args)
        assert up._marked(tmp_path) == {first}
    finally:
        assert up.down(args) == 0
    assert up._marked(tmp_path) == set()


@pytest.mark.slow
def test_up_again_down_and_whatever_died_meanwhile(tmp_path: Path) -> None:
    r1flow = Installation(tmp_path / "home")
    said = r1flow.up()
    sign_in = f"http://127.0.0.1:{r1flow.prefect_port}/r1-sign-in#r1flow"
    assert re.fullmatch(rf"Prefect: {sign_in}\S{{40,}}\nMLflow:  http://127.0.0.1:{r1flow.mlflow_port}\n", said)
    parts = r1flow.state()["parts"]
    assert set(parts) == {
        *("prefect", "mlflow", "take-up"),
        *("worker-r1-cpu", "worker-r1-tasks", "worker-r1-gpu-0"),
    }
    again = r1flow("up")
    assert (again.returncode, again.stdout) == (0, said) and "it is up already" in again.stderr
    weekly = "/deployments/name/train-r1/train-r1-weekly"
    r1flow.ask("PATCH", f"/deployments/{r1flow.ask('GET', weekly)['id']}", description="changed by somebody")
    for part in ("mlflow", "worker-r1-tasks"):
        os.kill(r1flow.pid(part), signal.SIGKILL)
    r1flow.wait(lambda: all(r1flow.state()["parts"][p] != parts[p] for p in ("mlflow", "worker-r1-tasks")), "new ones")
    # The one that keeps them alive is killed: its parts go with it, and the next `r1 up` brings all back.
    os.kill(int(r1flow.state()["supervisor"].split()[0]), signal.SIGKILL)
    assert r1flow.up() == said
    assert r1flow.ask("GET", weekly)["description"] == "changed by somebody"
    r1flow.down()
    assert R1(r1flow.home)("down").stderr.strip() == "nothing was running"


class OwnModules(Installation):
    """With a folder of modules that everything which it starts can import."""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(self.home / "modules")])}


@pytest.mark.slow
def test_workers_and_trainers_find_a_reward_of_ones_own_through_pythonpath(tmp_path: Path) -> None:
    r1flow = OwnModules(tmp_path)
    (tmp_path / "modules").mkdir()
    reward = "def brief(problem, response):\n    return float(response.tokens < 40)\n"
    (tmp_path / "modules" / "my_rewards.py").write_text(reward)
    r1flow.up()
    settings = ['r1_zero.rewards={accuracy=1.0, "my_rewards:brief"=0.5}', "r1_zero.steps=1", "base.pretrain.steps=50"]
    r1flow.wait_for(r1flow.start("train-r1-zero/train-r1-zero", *settings), "Completed")
    r1flow.down()
    (manifest,) = (json.loads(path.read_text()) for path in tmp_path.glob("artifacts/r1_zero/*/*/manifest.json"))
    assert 0 <= manifest["metrics"]["reward_my_rewards:brief"] <= 1


@pytest.mark.slow
def test_an_old_database_is_one_line(tmp_path: Path) -> None:
    import sqlite3

    r1flow = Installation(tmp_path)
    make_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = '451aebb31d03'")  # of MLflow 1.0
    done = r1flow("up", "--prefect-port", str(r1flow.prefect_port), "--mlflow-port", str(r1flow.mlflow_port))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "error: mlflow: its database has the schema of another version; copy it, then `mlflow db upgrade`"
    )
    assert not r1flow.running()


@pytest.mark.slow
@needs_postgres
def test_postgres_keeps_both_records() -> None:
    with postgres_installation() as r1flow:
        r1flow.up()
        assert not (r1flow.home / "mlflow.db").exists() and not (r1flow.home / "prefect" / "prefect.db").exists()
        r1flow.wait_for(r1flow.start(only="problems"), "Completed")
        killed = r1flow.pid("postgres")
        os.kill(killed, signal.SIGKILL)
        r1flow.wait(lambda: r1flow.pid("postgres") != killed and r1flow.answers(), "Postgres")
        r1flow.wait_for(r1flow.start("train-r1/train-r1", "problems.held_out_max=20", only="problems"), "Completed")
        r1flow.down()
        assert (r1flow.home / "postgres" / "password").stat().st_mode & 0o777 == 0o600
