"""Tracking against real MLflow stores in sqlite files."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.store.manifest import Manifest
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.database import make_database
from tasks.tracking.names import metric_name

ROOT = Path(__file__).parents[3]
CONFIG = {"model": "tiny", "rl": {"lr": 1e-6, "steps": 3, "domains": ["math", "code"]}, "seed": None, "ema": True}


def manifest(digest: str = "ab" * 32) -> Manifest:
    return Manifest(
        stage="sft", stage_version=1, key="cd" * 32, digest=digest, attempt=1, created="2026-01-01T00:00:00+00:00",
        seconds=1.0, config={}, inputs={}, files={}, counts={"samples": 7}, path=Path("/store/sft/1"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One database for the module: making one takes a second."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def tracking(home):
    return Tracking(default_uri(home))


@pytest.fixture
def client(home):
    from mlflow import MlflowClient

    return MlflowClient(default_uri(home))


@pytest.fixture
def run(tracking):
    return tracking.stage_run(None, "r1", "sft", CONFIG, {})


def history(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run, name)]


def artifact(client, run, name):
    return Path(client.download_artifacts(run, name)).read_text()


def test_a_recipe_run_has_stage_runs_below_it(tracking, client, home):
    parent = tracking.recipe_run("r1-zero", "first", CONFIG, {"note": "x"})
    child = tracking.stage_run(parent, "r1-zero", "rl", {"lr": 1}, {"key": "k"})
    run, below = client.get_run(parent), client.get_run(child)
    assert client.get_experiment(run.info.experiment_id).name == "r1-zero"
    assert run.info.run_name == "first" and run.info.status == "RUNNING" and run.data.tags["note"] == "x"
    assert run.data.params == {
        "model": "tiny", "rl.lr": "1e-06", "rl.steps": "3", "rl.domains": '["math", "code"]',
        "seed": "null", "ema": "true",
    }  # fmt: skip
    assert json.loads(artifact(client, parent, "recipe.json")) == CONFIG
    assert below.data.tags["mlflow.parentRunId"] == parent and below.data.tags["key"] == "k"
    assert json.loads(artifact(client, child, "config.json")) == {"lr": 1}
    assert (home / "mlartifacts" / "r1-zero" / child / "artifacts" / "config.json").exists()
    tracking.finish(child, "FINISHED")
    tracking.finish(parent, "FAILED")
    assert [client.get_run(run).info.status for run in (child, parent)] == ["FINISHED", "FAILED"]


def test_many_and_long_params(tracking, client):
    config = {f"p{i}": i for i in range(250)} | {"long": "x" * 6001, "odd (name)@1": 1}
    run = client.get_run(tracking.recipe_run("r1", "n", config, {}))
    assert len(run.data.params) == 251 and "long" not in run.data.params and run.data.params["odd _name__at_1"] == "1"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("loss", "loss"),
        ("pass@1", "pass_at_1"),
        ("eval/cons@16", "eval/cons_at_16"),
        ("reward (mean)", "reward _mean_"),
        ("a,b=c%", "a_b_c_"),
        ("/../x/", "x"),
        ("@", "_at_"),
    ],
)
def test_metric_names_are_ones_that_mlflow_takes(tracking, client, run, name, safe):
    assert metric_name(name) == safe
    tracking.log_metrics(run, [{"step": 1, name: 0.5}])
    assert client.get_run(run).data.metrics == {safe: 0.5}


def test_metrics_are_logged_once_also_by_a_resumed_run(tracking, client, home, run):
    tracking.log_metrics(run, [{"step": 1, "loss": 3, "note": "words"}, {"step": 2, "loss": 2.5, "ok": True}])
    tracking.log_metrics(run, [{"step": 2, "loss": 2.5}, {"step": 2, "pass@1": 0.5}, {"step": 3, "loss": 2}])
    resumed = Tracking(default_uri(home))
    resumed.reopen(run)
    resumed.log_metrics(run, [{"step": 2, "loss": 2.5}, {"step": 3, "loss": 2}, {"step": 4, "loss": 1}])
    assert history(client, run, "loss") == [(1, 3.0), (2, 2.5), (3, 2.0), (4, 1.0)]
    assert history(client, run, "pass_at_1") == [(2, 0.5)] and history(client, run, "ok") == [(2, 1.0)]
    assert "note" not in client.get_run(run).data.metrics


def test_a_stage_run_is_known_by_its_parent_and_what_it_made(tracking, run):
    tags = {"r1flow.stage": "sft", "r1flow.digest": "ab" * 32}
    below = tracking.stage_run(run, "tiny", "sft seed 0", {}, tags)
    assert not tracking.has_stage_run(run, "sft", "ab" * 32)  # it has not ended
    tracking.finish(below, "FINISHED")
    assert tracking.has_stage_run(run, "sft", "ab" * 32)
    assert not tracking.has_stage_run(run, "sft", "cd" * 32)
    assert not tracking.has_stage_run(below, "sft", "ab" * 32)


def test_more_than_one_batch_and_what_is_not_finite(tracking, client, run):
    tracking.log_metrics(run, [{"step": i, "a": i, "b": -i} for i in range(1100)])
    assert len(history(client, run, "a")) == len(history(client, run, "b")) == 1100
    tracking.log_metrics(run, [{"step": 1, "kl": math.inf}, {"step": 2, "kl": math.nan}, {"step": 3, "kl": 1.0}])
    values = [value for _, value in history(client, run, "kl")]
    assert math.isnan(values[0]) and math.isnan(values[1]) and values[2] == 1.0


def test_data_sets_go_in_and_out_by_digest(tracking, client, run):
    tracking.log_dataset(run, manifest(), "cold-start", "output")
    tracking.log_dataset(run, manifest("ef" * 32), "prompts", "input")
    found = {entry.dataset.name: entry for entry in client.get_run(run).inputs.dataset_inputs}
    made = found["cold-start"]
    assert made.dataset.digest == ("ab" * 32)[:36] and json.loads(made.dataset.source) == {"uri": "/store/sft/1"}
    assert json.loads(made.dataset.profile) == {"samples": 7, "sha256": "ab" * 32}
    assert {tag.key: tag.value for tag in made.tags}["mlflow.data.context"] == "output"
    assert {tag.key: tag.value for tag in found["prompts"].tags}["mlflow.data.context"] == "input"


def test_a_checkpoint_links_the_run_that_made_it_to_the_run_that_uses_it(tracking, client, run):
    made = manifest("12" * 32)
    assert tracking.models.find(made.digest) is None
    model_id = tracking.models.log(run, made, "sft", step=3)
    assert tracking.models.find(made.digest) == model_id
    model = client.get_logged_model(model_id)
    assert model.source_run_id == run and model.tags["sha256"] == made.digest and model.tags["uri"] == "/store/sft/1"
    assert str(model.status) == "READY"
    later = tracking.stage_run(None, "r1", "rl", {}, {})
    tracking.models.log_input(later, model_id)
    assert [(out.model_id, out.step) for out in client.get_run(run).outputs.model_outputs] == [(model_id, 3)]
    assert [model.model_id for model in client.get_run(later).inputs.model_inputs] == [model_id]


def test_tables_texts_files_and_tags(tracking, client, run, tmp_path):
    tracking.log_table(run, "samples", [{"id": "a", "reward": 1.0, "rewards": {"accuracy": 1}}, {"id": "b", "n": 2}])
    (tmp_path / "f.txt").write_text("from a file")
    tracking.log_file(run, tmp_path / "f.txt", "logs")
    tracking.log_text(run, "some text", "notes/a.md")
    tracking.set_tags(run, {"steps": "3"})
    table = json.loads(artifact(client, run, "samples.json"))
    assert table["columns"] == ["id", "reward", "rewards", "n"]
    assert table["data"] == [["a", 1.0, '{"accuracy": 1}', None], ["b", None, None, 2.0]]
    tags = client.get_run(run).data.tags
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert tags["steps"] == "3"
    assert artifact(client, run, "logs/f.txt") == "from a file" and artifact(client, run, "notes/a.md") == "some text"


def test_what_mlflow_refuses_is_not_tried_for_ever(tracking, client, run, caplog, tmp_path):
    tracking.log_text(run, "x", "../outside")
    tracking.log_file(run, tmp_path / "absent")
    tracking.log_metrics(run, [{"step": 1, "loss": 1}])
    tracking.log_metrics(run, [{"step": 2, "loss": 1}])
    assert "not for file ../outside: giving up" in caplog.text and "absent" in caplog.text
    caplog.clear()
    tracking.log_metrics(run, [{"step": 3, "loss": 1}])
    assert caplog.text == ""
    assert history(client, run, "loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]


def mine(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("tasks.tracking.")]


def test_a_store_that_fails_later_costs_one_warning_and_no_data(tracking, home, client, run, caplog):
    database = sqlite3.connect(home / "mlflow.db", isolation_level=None)
    with caplog.at_level(logging.INFO):
        tracking.log_metrics(run, [{"step": 1, "loss": 3}])
        database.execute("ALTER TABLE runs RENAME TO runs_away")
        tracking.log_metrics(run, [{"step": 2, "loss": 2}])
        tracking.set_tags(run, {"a": "b"})
        tracking.log_metrics(run, [{"step": 3, "loss": 1}])
        assert tracking.models.log(run, manifest(), "sft", 3) is None
        database.execute("ALTER TABLE runs_away RENAME TO runs")
        tracking.log_metrics(run, [{"step": 4, "loss": 0}])
    database.close()
    failed, works = mine(caplog)
    assert "fails (metrics: " in failed and "no such table" in failed and "works again" in works
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == ["tasks.tracking.outbox"]
    assert history(client, run, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0)]
    assert client.get_run(run).data.tags["a"] == "b"


def test_the_end_of_a_run_sends_what_is_left_or_says_what_is_lost(tracking, home, client, run, caplog, monkeypatch):
    monkeypatch.setattr("tasks.tracking.connection.MAX_LOCKED_S", 0.0)
    monkeypatch.setattr("tasks.tracking.connection.AWAY_POLL_S", 0.0)
    other = tracking.stage_run(None, "r1", "sft", {}, {})
    database = sqlite3.connect(home / "mlflow.db", isolation_level=None)
    database.execute("ALTER TABLE runs RENAME TO runs_away")
    tracking.finish(other, "FAILED")
    assert f"misses: the end of run {other}" in mine(caplog)[-1]
    tracking.log_metrics(run, [{"step": 1, "loss": 3}])
    with pytest.raises(InputError, match=rf"misses: metrics, .*the end of run {run}.*; see that it can be written"):
        tracking.finish(run, "FINISHED")
    database.execute("ALTER TABLE runs_away RENAME TO runs")
    database.close()
    tracking.log_text(tracking.stage_run(None, "r1", "rl", {}, {}), "x", "x.txt")
    assert client.get_run(run).info.status == "FINISHED"


def test_the_end_of_a_run_is_not_given_up_while_mlflow_takes_other_calls(tracking, client, run, monkeypatch):
    monkeypatch.setattr("tasks.tracking.connection.AWAY_POLL_S", 0.0)
    late, end = [*range(5)], tracking.client.set_terminated

    def slow_end(*arguments):
        if late:
            late.pop()
            raise OSError("timed out")
        end(*arguments)

    monkeypatch.setattr(tracking.client, "set_terminated", slow_end)
    tracking.finish(run, "FINISHED")
    assert client.get_run(run).info.status == "FINISHED" and not late


def test_a_store_that_fails_at_the_start_stops_the_run(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is not a database, it is a text file of some length")
    with pytest.raises(InputError, match=r"file is not a database; that file is damaged: restore it"):
        Tracking(default_uri(tmp_path)).recipe_run("r1", "n", {}, {})
    with pytest.raises(InputError, match=r"http://127.0.0.1:9 failed"):
        Tracking("http://127.0.0.1:9").recipe_run("r1", "n", {}, {})


def test_a_database_of_another_version_is_said_to_be_upgradable(tmp_path):
    uri = default_uri(tmp_path)
    make_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("update alembic_version set version_num = '451aebb31d03'")  # of MLflow 1.0
    with pytest.raises(InputError, match=f"the schema of another version.*`mlflow db upgrade {uri}`$"):
        Tracking(uri).open()


def test_a_deleted_experiment_is_said_to_be_restorable(tracking, client):
    run = tracking.recipe_run("gone", "n", {}, {})
    client.delete_experiment(client.get_run(run).info.experiment_id)
    with pytest.raises(InputError, match="'gone' was deleted; restore it with `mlflow experiments restore -x "):
        tracking.recipe_run("gone", "n", {}, {})


def left_by_the_dead(home):
    """The run of a process that was killed."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tasks.tracking.client import Tracking\n"
        f"print(Tracking({default_uri(home)!r}).stage_run(None, 'r1', 'sft', {{}}, {{}}), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == -9 and child.stderr == ""
    return child.stdout.strip()


def test_runs_of_dead_processes_are_marked_killed(tracking, client, home, run):
    elsewhere = tracking.stage_run(None, "r1", "sft", {}, {"r1flow.host": "another-host"})
    dead = left_by_the_dead(home)
    assert client.get_run(dead).info.status == "RUNNING"
    # That its process id lives again does not save it: that process began at another time.
    _, rest = client.get_run(dead).data.tags["r1flow.process"].split(" ", 1)
    client.set_tag(dead, "r1flow.process", f"{os.getpid()} {rest}")
    assert tracking.reconcile() == [dead]
    assert [client.get_run(r).info.status for r in (dead, run, elsewhere)] == ["KILLED", "RUNNING", "RUNNING"]


def test_a_recipe_that_ends_ends_the_runs_of_the_dead(tracking, client, home):
    dead = left_by_the_dead(home)
    tracking.reconcile_now()
    assert client.get_run(dead).info.status == "KILLED"


def test_a_stage_that_begins_ends_the_runs_of_the_dead(tracking, client, home):
    dead = left_by_the_dead(home)
    begun = tracking.stage_run(None, "r1", "sft", {}, {})
    assert [client.get_run(r).info.status for r in (dead, begun)] == ["KILLED", "RUNNING"]


def test_a_new_database_is_made_quietly_and_mlflow_is_imported_late(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from tasks.tracking.client import Tracking\n"
        "from tasks.tracking.connection import default_uri\n"
        f"from pathlib import Path; tracking = Tracking(default_uri(Path({str(tmp_path / 'new')!r})))\n"
        "assert 'mlflow' not in sys.modules\n"
        "tracking.recipe_run('r1', 'n', {}, {})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mlartifacts", "mlflow.db"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


class Restarted:
    """An MLflow server that is away for its first answers: its port is closed, then it listens."""

    def __init__(self, home):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1"]
        self.command += ["--backend-store-uri", default_uri(home), "--no-serve-artifacts"]
        self.command += ["--default-artifact-root", (home / "mlartifacts").as_uri()]
        self.process = None

    def start(self):
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(
            self.command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError("the server did not start")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
def test_a_server_that_comes_back_misses_nothing_and_one_that_does_not_stops_the_stage(tmp_path, monkeypatch):
    server = Restarted(tmp_path)
    server.start()
    try:
        record = Tracking(f"http://127.0.0.1:{server.port}")
        parent = record.recipe_run("r1", "n", {}, {})
        server.kill()
        again = threading.Timer(3, server.start)
        again.start()
        run = record.stage_run(parent, "r1", "sft", {}, {})  # waits for it
        again.join()
        record.log_metrics(run, [{"step": 1, "loss": 3}])
        server.kill()
        record.log_metrics(run, [{"step": 2, "loss": 2}])
        record.set_tags(run, {"a": "b"})
        monkeypatch.setattr("tasks.tracking.connection.MAX_AWAY_S", 1.0)
        with pytest.raises(
            InputError, match=r"has been away for .* minutes and misses what this stage logged; start it"
        ):
            record.settle(run)
        server.start()
        record.settle(run)
        record.finish(run, "FINISHED")
    finally:
        server.kill()
    from mlflow import MlflowClient

    client = MlflowClient(default_uri(tmp_path))
    assert history(client, run, "loss") == [(1, 3.0), (2, 2.0)]
    assert client.get_run(run).data.tags["a"] == "b" and client.get_run(run).info.status == "FINISHED"


@pytest.mark.slow
def test_a_kill_while_mlflows_database_is_made_leaves_none(tmp_path: Path) -> None:
    """Killed at 12 moments from before the first table to after the last; then a run is recorded."""

    def start(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "tasks.tracking.database", str(path)], cwd=ROOT)

    began = time.monotonic()
    assert start(tmp_path / "whole.db").wait() == 0
    took = time.monotonic() - began
    for part in range(1, 13):
        path = tmp_path / f"{part}.db"
        process = start(path)
        time.sleep(took * (0.4 + 0.05 * part))
        process.kill()
        process.wait()
        assert Tracking(f"sqlite:///{path}").recipe_run("tiny", "after a kill", {}, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_leave_a_stopped_run_running(tracking, client, run, monkeypatch, number):
    terminate = tracking.client.set_terminated

    def interrupted(*arguments):
        os.kill(os.getpid(), number)  # Ctrl-C again, in the middle of the end
        time.sleep(0.05)
        terminate(*arguments)

    monkeypatch.setattr(tracking.client, "set_terminated", interrupted)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    tracking.fail(run, KeyboardInterrupt(), {"r1flow.status": "failed"})
    assert client.get_run(run).info.status == "KILLED"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_run_that_an_error_ends_has_failed_and_says_why(tracking, client, run):
    tracking.fail(run, ValueError("loss is NaN"), {})
    ended = client.get_run(run)
    assert ended.info.status == "FAILED" and "loss is NaN" in ended.data.tags.values()


def test_a_full_disk_is_called_that(tracking, home):
    def write():
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(InputError, match=f"no space left on {home}: free some"):
        tracking.or_stop(write)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """A server that can be stopped for a while, so that it answers late; requests time out after two seconds."""
    server = Restarted(tmp_path_factory.mktemp("slow"))
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        yield server
    server.kill()


def stall(server, seconds):
    os.killpg(server.process.pid, signal.SIGSTOP)
    going_on = threading.Timer(seconds, lambda: os.killpg(server.process.pid, signal.SIGCONT))
    going_on.start()
    return going_on


def names_of_runs(server, experiment):
    client = Tracking(f"http://127.0.0.1:{server.port}").client
    found = client.get_experiment_by_name(experiment)
    return [(run.info.run_name, run.info.status) for run in client.search_runs([found.experiment_id])] if found else []


@pytest.mark.slow
def test_a_run_that_the_server_begins_late_is_there_once(slow_server):
    record = Tracking(f"http://127.0.0.1:{slow_server.port}")
    record.finish(record.recipe_run("late", "warm", {}, {}), "FINISHED")
    create, stalled = record.client.create_run, []

    def create_late(*arguments, **keywords):
        if not stalled:
            stalled.append(stall(slow_server, 5))
        return create(*arguments, **keywords)

    record.client.create_run = create_late
    run = record.recipe_run("late", "twice", {}, {})
    stalled[0].join()
    time.sleep(1)  # until the server has come to every request
    record.finish(run, "FINISHED")
    assert sorted(names_of_runs(slow_server, "late")) == [("twice", "FINISHED"), ("warm", "FINISHED")]


@pytest.mark.slow
def test_a_recipe_of_a_worker_waits_for_a_server_that_is_busy_when_it_begins(slow_server):
    url = f"http://127.0.0.1:{slow_server.port}"
    going_on = stall(slow_server, 12)  # longer than all tries of MLflow's client
    with pytest.raises(InputError, match="start that server or give another tracking uri"):
        Tracking(url).reconcile()  # a person who waits for the command is told
    going_on.join()
    going_on = stall(slow_server, 12)
    record = Tracking(url, expected=True)
    record.reconcile()
    run = record.recipe_run("queued", "patient", {}, {})
    going_on.join()
    going_on = stall(slow_server, 12)
    assert record.page(run) is not None  # a server that was there before is waited for, whoever asks
    going_on.join()
    record.finish(run, "FINISHED")
    assert names_of_runs(slow_server, "queued") == [("patient", "FINISHED")]
