"""The suite itself: a short form with a real kill, and its journal and table."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import attempt
from tests.chaos.faults.all import KINDS
from tests.chaos.faults.kills import send
from tests.chaos.homes import Homes
from tests.chaos.proxy import Proxy
from tests.chaos.reads import Watched
from tests.chaos.servers import Server
from tests.chaos.table import page, read, table
from tests.chaos.trial import BY_RERUN, CLEAR, HEALED, WRONG, Ended
from tests.chaos.zygote import Forked, Zygote
from tests.support.environments import script_environment


def test_there_are_thirty_kinds_and_a_try_is_the_same_each_time() -> None:
    assert len(KINDS) >= 30
    kind = KINDS["SIGKILL of the flow"]
    assert kind.choose(random.Random("0 a 1")) == kind.choose(random.Random("0 a 1"))
    assert {kind.choose(random.Random(n))[0] for n in range(50)} == set(kind.targets)


def test_a_clear_failure_is_one_line_and_the_right_exit_code() -> None:
    line = "error: sft: no space left on /home: free some\n"
    assert Ended(2, f"sft: step 1/18\r{line}", 1.0).is_clear
    assert not Ended(3, line, 1.0).is_clear
    assert not Ended(1, "Traceback (most recent call last):\n  ...\nOSError: no space\n", 1.0).is_clear
    assert not Ended(1, f"Traceback (most recent call last):\n{line}", 1.0).is_clear
    assert not Ended(1, "sft failed\n", 1.0).is_clear


def test_the_journal_survives_a_kill_and_the_table_counts_the_newest_record(tmp_path: Path) -> None:
    journal, records = tmp_path / "journal.jsonl", []
    for number, outcome in [(0, WRONG), (0, HEALED), (1, CLEAR), (2, BY_RERUN), (3, WRONG)]:
        records.append({"kind": "k", "number": number, "seed": 0, "outcome": outcome, "why": "w", "commit": "abc"})
    journal.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"kind": "k", "num')
    assert "| k | 4 | 0, 4 unknown | 1 | 1 | 1 | 1 |" in table(read(journal))
    target = tmp_path / "page.md"
    target.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    page(target, read(journal), ["k", "l"], "command", "machine")
    text = target.read_text()
    assert "old" not in text and text.startswith("before") and text.endswith("after\n")
    assert "Without a try so far: l." in text and "- k (try 3, abc): w" in text and "abc (4)" in text


def test_the_table_counts_faults_that_struck_and_names_tries_of_a_suite_that_did_not_look() -> None:
    base = {"kind": "k", "seed": 0, "outcome": HEALED, "why": "w", "commit": "abc"}
    records: list[dict[str, Any]] = [{**base, "number": 0, "struck": True}, {**base, "number": 1, "struck": False}]
    assert "| k | 2 | 1 | 2 | 0 | 0 | 0 |" in table(records)
    assert "| k | 3 | 1, 1 unknown | 3 | 0 | 0 | 0 |" in table([*records, {**base, "number": 2}])


def test_a_signal_strikes_who_lives_and_listens() -> None:
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert not send(signal.SIGINT, process.pid)
        assert send(signal.SIGSTOP, process.pid)
        assert send(signal.SIGCONT, process.pid)
        assert send(signal.SIGKILL, process.pid)
        assert not send(signal.SIGKILL, process.pid)  # nobody has waited for it: a zombie


def test_a_file_counts_as_read_when_it_is_and_when_it_was_moved_or_mapped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    written = path.stat().st_mtime_ns
    watched = Watched([path])
    path.stat(), path.rename(tmp_path / "moved")
    assert not watched.were_read()
    for look in (Path.read_bytes, mapped):
        watched = Watched([tmp_path / "moved"])
        look(tmp_path / "moved")
        (tmp_path / "moved").rename(tmp_path / "again")
        (tmp_path / "again").rename(tmp_path / "moved")
        assert watched.were_read()
    assert (tmp_path / "moved").stat().st_mtime_ns == written
    watched = Watched([tmp_path])
    assert not watched.were_read() and [*tmp_path.iterdir()]


def mapped(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        assert content[0] == ord("c")


def test_the_proxy_counts_requests_that_a_fault_met() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = Proxy(server.getsockname()[1])
        client = socket.create_connection(("127.0.0.1", proxy.port))
        beyond, _ = server.accept()
        client.sendall(b"idle"), beyond.recv(9), beyond.sendall(b"reply"), client.recv(9)
        assert proxy.disturbed == 0
        proxy.mode = "away"
        client.sendall(b"asked while it is away"), beyond.recv(99)
        assert proxy.disturbed == 1
        proxy.mode = "pass"
        proxy.cut()  # the client waits for its reply
        assert proxy.disturbed == 2
        proxy.mode = "refuse"
        with socket.create_connection(("127.0.0.1", proxy.port)) as refused, contextlib.suppress(ConnectionError):
            assert refused.recv(9) == b""
        assert proxy.disturbed == 3
        proxy.close(), client.close(), beyond.close()


@pytest.mark.slow
def test_a_stage_that_is_killed_is_made_by_the_rerun(tmp_path: Path) -> None:
    server = Server("prefect", tmp_path / "server", tmp_path / "prefect.log")
    try:
        homes = Homes(tmp_path / "homes", prefect=server.url)
        homes.build(["problems"])
        record = attempt(homes, replace(KINDS["SIGKILL of the flow"], targets=("problems",)), 0, 0)
        assert record["outcome"] in (BY_RERUN, HEALED), record["why"]
        assert record["struck"] is (record["outcome"] == BY_RERUN)
    finally:
        server.stop()


@pytest.mark.system
def test_a_command_with_the_process_id_of_an_earlier_one_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("which process id comes next cannot be set here")
    zygote = Zygote(script_environment(R1FLOW_HOME=str(tmp_path)))
    try:
        wrong = zygote.fork(["no-such-command"], os.devnull)
        assert ended(wrong) == 2
        for _ in range(100):  # another process may take the number first
            last.write_text(str(wrong.pid - 1))
            right = zygote.fork(["recipes"], os.devnull)
            assert ended(right) == 0
            if right.pid == wrong.pid:
                return
        pytest.skip("the process id was never free")
    finally:
        zygote.close()


def ended(command: Forked) -> int:
    """Its exit code, once it has one."""
    while (code := command.poll()) is None:
        time.sleep(0.01)
    return code
