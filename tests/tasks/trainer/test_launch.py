"""Launching real subprocesses that behave and misbehave in the ways trainers do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.errors import InputError
from grpo.processes.loading import CANNOT_LOAD
from tasks.trainer import launch as module
from tasks.trainer import process_group
from tasks.trainer.launch import launch
from tasks.trainer.outcome import StageFailed, failure

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[3]
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
job = pathlib.Path(sys.argv[1])
work = job.parent
def done(completed, planned):
    (work / "result.json").write_text(json.dumps({"steps_completed": completed, "steps_planned": planned}))
def metric(text):
    with (work / "metrics.jsonl").open("a") as file:
        file.write(text)
def hears():
    deadline = time.monotonic() + 60
    while not (work / "heard").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
apart = subprocess.Popen(["sleep", "300"], start_new_session=True)
(work / "pids").write_text(f"{os.getpid()} {child.pid} {apart.pid}")
time.sleep(300)
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Let `launch` run a script instead of grpo.train; returns a function that launches it."""

    def run(body: str, grace_s: float = 1.0, **kwargs):
        monkeypatch.setattr(process_group, "GRACE_S", grace_s)
        script = tmp_path / "trainer.py"
        script.write_text(PRELUDE + body)
        monkeypatch.setattr(module, "command", lambda job, *_: [sys.executable, str(script), str(job)])
        kwargs.setdefault("on_metrics", lambda records: None)
        return launch({"lr": 0.1}, tmp_path / "work", **kwargs)

    return run


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)
    return path.read_text()


def test_the_command():
    counts = ["--processes", "4", "--nodes", "2"]
    assert module.command(Path("j.json"), 4, 2) == [sys.executable, "-m", "grpo.train", *counts, "j.json"]


@pytest.mark.parametrize(
    "job",
    [
        {"settings": {"hardware": {"processes": 3}}},
        {"hardware": {"processes": 3}, "tasks": []},  # sampling has no settings
    ],
)
def test_the_jobs_hardware_says_how_many_processes(tmp_path, monkeypatch, job):
    asked = []
    monkeypatch.setattr(module, "command", lambda *counts: asked.append(counts) or [sys.executable, "-c", "1 / 0"])
    with pytest.raises(StageFailed, match="ZeroDivisionError"):
        launch(job, tmp_path, on_metrics=print)
    assert asked == [(tmp_path / "job.json", 3, 1)]


def test_several_machines_need_a_place_to_meet(tmp_path):
    words = r"^hardware.nodes is 2, but nothing says where the machines meet: set PET_RDZV_ENDPOINT to HOST:PORT"
    with pytest.raises(InputError, match=words):
        launch({"hardware": {"nodes": 2}}, tmp_path, on_metrics=print)


def test_success_returns_the_result_and_every_metric_once(trainer, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "metrics.jsonl").write_text('{"step": 1, "loss": 9}\n')  # of an earlier attempt
    (work / "result.json").write_text("stale")
    seen = []
    body = """
assert not (work / "result.json").exists()
assert json.loads(job.read_text()) == {"lr": 0.1}
assert int(os.environ["R1FLOW_PARENT_PID"]) == os.getppid()
assert os.environ["EXTRA"] == "1" and os.getpgid(0) == os.getpid()
import grpo
metric('{"step": 2, "loss": 0.5}\\n{"step": 3, "lo')
hears()
metric('ss": 0.25}\\nnot json\\n{"step": 4}\\n{"step": 5, "half')
done(4, 4)
"""
    result = trainer(body, on_metrics=lambda new: (seen.append(new), (work / "heard").touch()), env={"EXTRA": "1"})
    assert result == {"steps_completed": 4, "steps_planned": 4}
    assert seen[0] == [{"step": 2, "loss": 0.5}]  # handed over while the trainer ran
    assert [record for batch in seen[1:] for record in batch] == [{"step": 3, "loss": 0.25}, {"step": 4}]


def test_a_refused_input_is_the_users_error(trainer):
    with pytest.raises(InputError, match=r"^/data/x: column 'answer' is missing$"):
        trainer("print('loading'); sys.stderr.write(\"error: /data/x: column 'answer' is missing\"); sys.exit(2)")


def test_exit_2_without_a_message_is_a_failure(trainer):
    with pytest.raises(StageFailed, match="exited with 2: it logged nothing"):
        trainer("sys.exit(2)")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "exited with 0 but without writing result.json"),
        ("(work / 'result.json').write_text('{')", "with a bad result.json"),
        ("done(3, 10)", "exited with 0 after 3 of 10 planned steps"),
        ("print('step 3', flush=True); os.kill(os.getpid(), 9)", r"killed by SIGKILL \(by the kernel.*: step 3; log: "),
        ("done(3, 3); raise RuntimeError('boom')", "exited with 1: RuntimeError: boom; log: .*trainer.log"),
    ],
)
def test_an_exit_code_is_not_trusted(trainer, body, words):
    with pytest.raises(StageFailed, match=words):
        trainer(body)


def test_the_message_is_of_this_attempt(trainer):
    with pytest.raises(StageFailed, match="boom"):
        trainer("raise RuntimeError('boom')")
    with pytest.raises(StageFailed, match="it logged nothing"):
        trainer("sys.exit(3)")


def test_the_time_limit_ends_the_trainer_and_all_it_started(trainer, tmp_path):
    began = time.monotonic()
    with pytest.raises(StageFailed, match="ran past its limit of 6 s"):
        trainer(STUBBORN, time_limit_s=6)
    assert time.monotonic() - began < 40
    pids = [int(pid) for pid in (tmp_path / "work" / "pids").read_text().split()]
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)


def test_what_a_finished_trainer_leaves_behind_is_ended(trainer, tmp_path):
    trainer("(work / 'pids').write_text(str(subprocess.Popen(['sleep', '300']).pid)); done(1, 1)")
    assert not alive(int((tmp_path / "work" / "pids").read_text()))


def test_sigterm_leaves_time_to_write_a_checkpoint(trainer, tmp_path):
    body = """
def save(*_):
    time.sleep(0.3)
    (work / "checkpoint").write_text("x")
    metric('{"step": 7}\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
metric('{"step": 1}\\n')
time.sleep(60)
"""

    def fail(records):
        raise ConnectionError("tracking is gone")

    with pytest.raises(ConnectionError, match="tracking is gone"):
        trainer(body, grace_s=20.0, on_metrics=fail)
    assert (tmp_path / "work" / "checkpoint").exists()


def test_metrics_written_during_the_grace_are_not_lost(trainer):
    seen = []
    body = """
def save(*_):
    metric('{"step": 7}\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""
    with pytest.raises(StageFailed, match="limit of 6 s"):
        trainer(body, grace_s=20.0, time_limit_s=6, on_metrics=seen.extend)
    assert seen == [{"step": 7}]


def test_metrics_that_a_resumed_trainer_takes_back_and_writes_again(trainer, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    seen = []
    body = """
(work / "metrics.jsonl").write_text('{"step": 1}\\n')
hears()
metric('{"step": 2}\\n')
done(2, 2)
"""
    trainer(body, on_metrics=lambda new: (seen.extend(new), (work / "heard").touch()))
    assert seen[-1] == {"step": 2}


# Stopping the flow's own process: a real one, sent a real signal.
FLOW = """
import signal, sys
# A shell without job control starts what runs in the background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {root!r})
from pathlib import Path
from tasks.trainer import launch, process_group
process_group.GRACE_S = 1.0
launch.command = lambda job, *_: [sys.executable, {script!r}, str(job)]
{before}
try:
    launch.launch({{}}, Path({work!r}), on_metrics=print)
except BaseException as error:
    print(repr(error), flush=True)
    raise
"""
OWN_HANDLER = """
import signal
class Cancelled(BaseException): pass
def handler(number, frame): raise Cancelled(number)
signal.signal(signal.SIGTERM, handler)
"""


@pytest.mark.parametrize(
    ("number", "before", "said", "code"),
    [
        (signal.SIGINT, "", "KeyboardInterrupt()", -signal.SIGINT),
        (signal.SIGTERM, "", "SystemExit(143)", 143),
        (signal.SIGTERM, OWN_HANDLER, "Cancelled(15)", 1),  # as Prefect's
    ],
)
def test_a_signal_to_the_flow_ends_the_trainer(tmp_path, number, before, said, code):
    script, work = tmp_path / "trainer.py", tmp_path / "work"
    script.write_text(PRELUDE + STUBBORN)
    source = FLOW.format(root=str(ROOT), script=str(script), work=str(work), before=before)
    flow = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in wait_for(work / "pids").split()]
    assert all(alive(pid) for pid in pids)
    flow.send_signal(number)
    out, _ = flow.communicate(timeout=120)
    assert out.strip() == said and flow.returncode == code
    assert not any(alive(pid) for pid in pids)


SAVES_SLOWLY = """
def save(*_):
    (work / "told").write_text("x")
    time.sleep(6.0)
    (work / "checkpoint").write_text("x")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(work / "pids").write_text(str(os.getpid()))
time.sleep(300)
"""


@pytest.mark.parametrize(("apart_s", "saved"), [(0.2, True), (3.0, False)])
def test_a_signal_that_comes_twice_lets_the_trainer_save(tmp_path, apart_s, saved):
    script, work = tmp_path / "trainer.py", tmp_path / "work"
    script.write_text(PRELUDE + SAVES_SLOWLY)
    limits = "process_group.GRACE_S, process_group.REPEAT_S = 20.0, 2.0"
    source = FLOW.format(root=str(ROOT), script=str(script), work=str(work), before=f"{OWN_HANDLER}\n{limits}")
    flow = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(wait_for(work / "pids"))
    flow.send_signal(signal.SIGTERM)
    wait_for(work / "told")
    time.sleep(apart_s)
    flow.send_signal(signal.SIGTERM)
    out, _ = flow.communicate(timeout=120)
    assert out.strip() == "Cancelled(15)"
    assert (work / "checkpoint").exists() is saved
    assert not alive(pid)


def test_it_runs_in_a_thread_where_no_handler_may_be_set(trainer):
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer("done(1, 1)")))
    thread.start()
    thread.join(30)
    assert results == [{"steps_completed": 1, "steps_planned": 1}]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_lock_goes_to_the_trainer(trainer, tmp_path):
    fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    try:
        trainer(f"os.fstat({fd}); done(1, 1)", lock_fd=fd)
    finally:
        os.close(fd)


# Real torchrun, two processes on the CPU.
@pytest.fixture
def torchrun(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "GRACE_S", 5.0)

    def run(body: str, **kwargs):
        script = tmp_path / "trainer.py"
        script.write_text(PRELUDE + WORKER + body)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        monkeypatch.setattr(module, "command", lambda job, *_: [*start, str(job)])
        job = {"hardware": {"processes": 2}}
        return launch(job, tmp_path / "work", on_metrics=lambda records: None, **kwargs)

    return run


WORKER = f"""
sys.path.insert(0, {str(ROOT)!r})
from grpo.processes.lifetime import write_whole_lines
write_whole_lines()
rank = int(os.environ['RANK'])
"""
JOINED = """
from grpo.config.common import Hardware
from grpo.distributed.process_group import Parallel, is_peer_failure
parallel = Parallel.start(Hardware(device="cpu"))
parallel.barrier()
print("joined")
def boom():
    raise ValueError("boom")
def wait():
    try:
        parallel.all_gather(rank)
    except Exception as error:
        assert is_peer_failure(error)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("sys.stderr.write('error: bad row\\n'); sys.exit(2)", InputError, "^bad row$"),
        ("raise RuntimeError('boom')", StageFailed, "exited with 1: RuntimeError: boom; log"),
        (
            "print('step 3', flush=True); rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)",
            StageFailed,
            r"^process 1 of 2 of the trainer was killed by SIGKILL \(by the kernel if memory ran out\): step 3; log",
        ),
        (
            JOINED + "rank == 1 and os.kill(os.getpid(), 9); wait()",
            StageFailed,
            r"^process 1 of 2 of the trainer was killed by SIGKILL \(by the kernel if memory ran out\): joined; log",
        ),
        (
            JOINED + "rank == 1 and boom(); wait()",
            StageFailed,
            "^process 1 of 2 .* exited with 1: ValueError: boom; log",
        ),
    ],
)
def test_torchrun_reports_what_the_worker_said(torchrun, body, error, words):
    with pytest.raises(error, match=words):
        torchrun(body)


def test_the_last_word_of_torchruns_own_process_counts(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("step 3\nW torch/distributed/elastic/multiprocessing/api.py\nerror: nothing answers at node0:1\n")
    assert str(failure(1, 4, log, 0)).startswith("the trainer exited with 1: error: nothing answers at node0:1;")


@pytest.mark.slow
def test_the_time_limit_reaches_torchrun_workers_in_their_own_sessions(torchrun, tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(work / f"pid-{rank}").write_text(str(os.getpid()))
time.sleep(300)
"""
    with pytest.raises(StageFailed, match="ran past its limit"):
        torchrun(body, time_limit_s=8)
    pids = [int((tmp_path / "work" / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert not any(alive(pid) for pid in pids)


def test_the_job_is_written_whole(trainer, tmp_path):
    trainer("done(1, 1)")
    assert json.loads((tmp_path / "work" / "job.json").read_text()) == {"lr": 0.1}
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["job.json", "result.json", "trainer.log"]


STOPS_ITSELF = """
signal.signal(signal.SIGTERM, lambda *_: ((work / "saved").write_text("yes"), sys.exit(0)))
(work / "pid").write_text(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP)
done(1, 1)
"""


def test_a_stopped_trainer_is_reported_and_goes_on_when_it_is_continued(trainer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(process_group, "STOPPED_S", 0.0)

    def go_on():
        pid = int(wait_for(tmp_path / "work" / "pid"))
        deadline = time.monotonic() + 20
        while f"kill -CONT {pid}" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(pid, signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    helper.start()
    assert trainer(STOPS_ITSELF) == {"steps_completed": 1, "steps_planned": 1}
    helper.join()
    pid = (tmp_path / "work" / "pid").read_text()
    assert caplog.text.count(f"process {pid} of the trainer is stopped") == 1


def test_a_stopped_trainer_can_save_when_it_is_ended(trainer, tmp_path):
    with pytest.raises(StageFailed, match="ran past its limit"):
        trainer(STOPS_ITSELF, grace_s=20.0, time_limit_s=6)
    assert (tmp_path / "work" / "saved").exists()


FULL_DISK = """
import sys
from pathlib import Path
from tasks.trainer.outcome import failure
folder = Path(sys.argv[1])
try:
    (folder / "state").write_bytes(bytes(1 << 20))  # 256 KiB are there
except OSError as error:
    print(error.strerror)
(folder / "trainer.log").touch()
print(failure(1, 1, folder / "trainer.log", 0))
"""


def test_a_full_disk_is_named_where_the_log_could_not_be_written(tmp_path):
    mount = f'mount -t tmpfs -o size=256k none "{tmp_path}" && exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "-", sys.executable, "-c", FULL_DISK]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0 and "Error" not in done.stderr:
        pytest.skip(f"no small disk can be mounted here: {done.stderr}")
    wrote, said = done.stdout.splitlines()
    assert wrote == "No space left on device"
    assert said == f"no space left on {tmp_path}: free some or move the home folder with R1FLOW_HOME"


def test_notices_reach_the_user_once_and_while_the_trainer_runs(trainer, tmp_path, caplog):
    body = """
from grpo.processes.notices import notice
print("a line for the log", file=sys.stderr)
notice("step-2: unreadable;\\ngoing back")
hears()
notice("the end")
done(int((work / "heard").exists()), 1)
"""

    def listen():
        deadline = time.monotonic() + 120
        while "going back" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "work" / "heard").touch()

    for _ in range(2):  # an earlier attempt's notices are in the same log
        caplog.clear()
        helper = threading.Thread(target=listen)
        helper.start()
        trainer(f"sys.path.insert(0, {str(ROOT)!r})" + body)
        helper.join()
        said = [record.getMessage() for record in caplog.records if record.name == module.logger.name]
        assert said == ["step-2: unreadable; going back", "the end"]
        (tmp_path / "work" / "heard").unlink()


def test_a_progress_bar_is_no_reason(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("step 3 of 18\nLoading weights: 100%|██████████| 29/29 [00:00<00:00, 29366.20it/s]\n")
    assert str(failure(-9, 1, log, 0)).endswith(f"(by the kernel if memory ran out): step 3 of 18; log: {log}")


def test_a_trainer_that_cannot_load_its_libraries_is_told_from_others(tmp_path):
    (tmp_path / "log").touch()
    assert "could not load its libraries; memory ran out: " in str(failure(-CANNOT_LOAD, 1, tmp_path / "log", 0))
