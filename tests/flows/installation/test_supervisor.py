"""Parts are kept alive; orphans and the stubborn are ended: real processes, watched through /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from grpo.processes.lifetime import process_name

PROGRAM = """
import os, sys
from pathlib import Path
import flows.installation.supervisor as s
s.GRACE_S, s.LOGS_S, s.LOG_BYTES = 1.0, 0.1, 1000
logs = Path(sys.argv[1])
supervisor = s.Supervisor(logs, lambda: (logs / "parts").write_text(repr(supervisor.processes())))
supervisor.start(s.Service("sleeper", ["sleep", "1000"]))
supervisor.start(s.Service("talker", ["sh", "-c", "while true; do echo a line of twenty bytes; sleep 0.01; done"]))
supervisor.start(s.Service("stubborn", [sys.executable, "-c", sys.argv[2], sys.argv[1]]))
supervisor.watch()
supervisor.stop()
"""
# It ignores SIGTERM, and so does its child, which has left for a session of its own.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1] + "/child", "w").write(str(os.getpid()))
time.sleep(1000)
"""


# Each change of state after the two starts fails, and so does what it prints to /dev/full.
FULL_DISK = """
import sys
from pathlib import Path
import flows.installation.supervisor as s
s.BACKOFF_S = (0.1,)
calls = []
def changed():
    calls.append(1)
    if len(calls) > 2:
        raise OSError(28, "No space left on device")
supervisor = s.Supervisor(Path(sys.argv[1]), changed)
supervisor.start(s.Service("sleeper", ["sleep", "1000"]))
supervisor.start(s.Service("brief", ["echo", "started"]))
supervisor.watch()
supervisor.stop()
"""
# Three services that take 2 s to stop, once they have said that they are up.
BUSY = """
import sys, time
from pathlib import Path
import flows.installation.supervisor as s
logs = Path(sys.argv[1])
supervisor = s.Supervisor(logs)
for name in "abcdef":
    supervisor.start(s.Service(name, ["sh", "-c", "trap 'sleep 2; exit' TERM; echo up; while :; do sleep 0.1; done"]))
while [log.read_text() for log in logs.glob("*.log")] != ["up\\n"] * 6:
    time.sleep(0.1)
began = time.monotonic()
supervisor.stop(*"abcdef")
print(time.monotonic() - began, supervisor.services)
"""


def wait(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), STUBBORN])
    yield process
    process.kill()
    process.wait()
    for pid in (services(tmp_path).get("stubborn"), stubborn_child(tmp_path)):  # these hear no SIGTERM
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def services(folder: Path) -> dict[str, int]:
    try:
        said = eval((folder / "parts").read_text())
    except (OSError, SyntaxError):
        return {}
    return {name: int(process.split()[0]) for name, process in said.items() if process}


def stubborn_child(folder: Path) -> int | None:
    try:
        return int((folder / "child").read_text())
    except (OSError, ValueError):
        return None


def test_a_part_that_was_killed_is_started_again_and_its_orphans_are_ended(
    supervisor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first = wait(lambda: len(found := services(tmp_path)) == 3 and found)
    orphan = wait(lambda: stubborn_child(tmp_path))
    os.kill(first["stubborn"], signal.SIGKILL)
    second = wait(lambda: (found := services(tmp_path)).get("stubborn") not in (None, first["stubborn"]) and found)
    assert second["sleeper"] == first["sleeper"]
    assert process_name(orphan) is None  # before the new one began: it would hold its port, or its GPU


def test_a_stop_leaves_nothing_however_stubborn(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    started = wait(lambda: len(found := services(tmp_path)) == 3 and found)
    child = wait(lambda: stubborn_child(tmp_path))
    supervisor.terminate()
    assert supervisor.wait(timeout=60) == 0
    assert {process_name(pid) for pid in (*started.values(), child)} == {None}


def test_a_full_disk_ends_no_service(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([sys.executable, "-c", FULL_DISK, str(tmp_path)], stdout=full)
    try:
        log = tmp_path / "brief.log"
        wait(lambda: log.exists() and log.read_text().count("started") >= 4)
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_services_that_stop_at_once_take_as_long_as_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BUSY, str(tmp_path)], capture_output=True, text=True, timeout=120)
    seconds, left = done.stdout.split()
    assert 2 <= float(seconds) < 8 and left == "[]"


def test_parts_go_with_a_supervisor_that_is_killed(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    started = wait(lambda: len(found := services(tmp_path)) == 3 and found)
    supervisor.kill()
    supervisor.wait()
    wait(lambda: process_name(started["sleeper"]) is None)


def test_a_log_does_not_grow_for_ever(supervisor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    log, old = tmp_path / "talker.log", tmp_path / "talker.log.1"
    first = wait(lambda: old.exists() and old.stat())
    wait(lambda: old.stat().st_ino != first.st_ino)  # and again: the process goes on writing to the emptied file
    assert first.st_size > 1000
    wait(lambda: 0 < log.stat().st_size < old.stat().st_size)
    assert {path.name for path in tmp_path.glob("talker*")} <= {"talker.log", "talker.log.1", "talker.log.partial"}
    assert set(log.read_text().splitlines()) <= {"a line of twenty bytes"}
