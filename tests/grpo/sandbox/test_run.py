"""Every hostile program ends as stated, with every set of walls that this machine can build, and leaves nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from grpo.processes.pool import Pool
from grpo.sandbox import run as sandbox
from grpo.sandbox import system_calls
from grpo.sandbox.run import Limits, Means, protections, run, scratch_dir
from tests.support.hostile import PROGRAMS, SMALL, means_of_kind

ROOT = Path(__file__).parents[3]
HOSTILE = ROOT / "tests" / "support" / "hostile.py"
KINDS = ("strongest", "user namespace", "user namespace, our files", "no namespaces")
PATIENCE_S = 60.0
SYSTEM_PYTHON = "/usr/bin/python3"
SOCKETS = "fills sockets together"
"""Without a network namespace its sockets cannot be told from others: docs/sandbox.md."""


@pytest.fixture(params=KINDS)
def means(request) -> Means:
    try:
        return means_of_kind(request.param)
    except LookupError:
        pytest.skip("this machine cannot do it")


@pytest.fixture
def unnamed():
    """Without namespaces."""
    try:
        return means_of_kind("no namespaces")
    except LookupError:
        pytest.skip("no interpreter that an unprivileged user can read")


@pytest.fixture
def remains(monkeypatch):
    """A function that lists what is left of the test's runs: processes, and files in the temporary folder."""
    folder = tempfile.mkdtemp(prefix="sandbox-test-")
    os.chmod(folder, 0o777)
    mark = os.path.basename(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setitem(sandbox._ENVIRONMENT, "TEST_MARK", mark)
    monkeypatch.setitem(os.environ, "TMPDIR", folder)

    def remaining() -> list[str]:
        return [*os.listdir(folder), *(f"process {pid}" for pid in processes_with(mark, folder))]

    yield remaining
    shutil.rmtree(folder)


def processes_with(mark: str, folder: str) -> list[int]:
    """Supervisors, inits and programs: all were given the mark or the folder, in the environment or on the way."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if mark.encode() in text or folder.encode() in text:
                found.append(int(entry.name))
    return found


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_ends_as_stated_and_leaves_nothing(name: str, remains) -> None:
    hostile = PROGRAMS[name]
    result = run(hostile.program, "", hostile.limits)
    assert (result.kind, result.stderr if result.kind != hostile.kind else "") == (hostile.kind, "")
    assert len(result.stdout.encode()) <= hostile.limits.output_bytes
    assert remains() == []


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"ignores being out of time", "spins", SOCKETS}))
def test_it_does_so_without_namespaces(name: str, unnamed: Means, remains) -> None:
    if os.geteuid() != 0 and name.startswith("kills all"):
        pytest.skip("it would: docs/sandbox.md")
    hostile = PROGRAMS[name]
    expected = "crash" if os.geteuid() != 0 and name == "kills its parent" else hostile.kind
    result = run(hostile.program, "", hostile.limits, unnamed)
    assert (result.kind, result.stderr if result.kind != expected else "") == (expected, "")
    assert remains() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason="no Python that other users can read")
@pytest.mark.parametrize(
    "kind", ["strongest", pytest.param("user namespace, our files", marks=pytest.mark.slow), "no namespaces"]
)
def test_it_does_so_for_an_ordinary_user(kind: str, remains) -> None:
    left_out = {"kills all it can", SOCKETS} if kind == "no namespaces" else set()
    names = sorted(PROGRAMS.keys() - left_out - {"ignores being out of time"})
    done = subprocess.run(
        [SYSTEM_PYTHON, HOSTILE, kind, *names],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,  # for all of them
    )
    if "LookupError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    expected = {name: PROGRAMS[name].kind for name in names}
    if kind == "no namespaces":
        expected["kills its parent"] = "crash"
    assert {name: ended for name, (ended, _) in json.loads(done.stdout).items()} == expected
    assert remains() == []


def test_output_input_and_exit_code_pass(means: Means) -> None:
    echo = run("import sys; print(input()[::-1]); print('aside', file=sys.stderr)", "stressed\n", SMALL, means)
    assert (echo.kind, echo.stdout, echo.stderr) == ("ok", "desserts\n", "aside\n")
    failed = run("raise ValueError('no')", "", SMALL, means)
    assert failed.kind == "error" and failed.stderr.endswith("ValueError: no\n")
    assert run("import sys; print(len(sys.stdin.read()))", "x" * 3_000_000, SMALL, means).stdout == "3000000\n"
    binary = run("import os; os.write(1, b'\\xff\\n')", "", SMALL, means)
    assert (binary.kind, binary.stdout) == ("ok", "\ufffd\n")


def test_a_well_behaved_program_has_threads_children_files_and_shared_memory(means: Means) -> None:
    program = (
        "import concurrent.futures as f, multiprocessing, os, tempfile\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x' * 1_000_000)\n"
        "with f.ThreadPoolExecutor(4) as pool: print(sum(pool.map(abs, range(-3, 0))))\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(sum(pool.map(abs, range(-4, 0))))\n"
    )
    result = run(program, "", SMALL, means)
    if "/dev/shm" in result.stderr:
        pytest.skip("no shared memory on this machine")
    assert (result.kind, result.stdout, result.stderr) == ("ok", "6\n10\n", "")  # 3 + 2 + 1, 4 + 3 + 2 + 1


def test_sockets_between_its_own_processes_work_and_other_kinds_do_not_exist(means: Means) -> None:
    program = (
        "import asyncio, socket\n"
        "async def main():\n"
        "    ours, theirs = socket.socketpair()\n"
        "    reader, writer = await asyncio.open_connection(sock=ours)\n"
        "    theirs.send(b'line\\n'); print(await reader.readline())\n"
        "asyncio.run(main())\n"
        "try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nexcept OSError as error: print(error.errno)\n"
        "else: print('allowed')"
    )
    result = run(program, "", SMALL, means)
    netlink = errno.EAFNOSUPPORT if protections(means)["gains_no_namespaces"] else "allowed"
    assert result.stdout == f"b'line\\n'\n{netlink}\n", result.stderr


def test_the_program_sees_an_empty_environment_and_no_descriptor_of_ours(means: Means, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "xyzzy")
    program = (
        "import os\nprint(*os.environ)\nprint(*os.environ.values())\nfor d in range(3, 128):\n"
        "    try: os.fstat(d); print('descriptor', d)\n    except OSError: pass"
    )
    result = run(program, "", SMALL, means)
    assert "SECRET_KEY" not in result.stdout and "xyzzy" not in result.stdout
    assert "descriptor" not in result.stdout
    assert result.stdout.startswith("PATH LANG")


def test_a_program_prints_a_set_in_the_same_order_in_every_run(means: Means) -> None:
    """Eight names have 40,320 orders."""
    if sandbox._isolating(means.python) == ["-I"]:
        pytest.skip("before Python 3.11, hashes are random")
    program = "print(*{'ada', 'bob', 'cy', 'dan', 'eve', 'flo', 'gus', 'hal'})"
    assert len({run(program, "", SMALL, means).stdout for _ in range(3)}) == 1


def test_no_setting_of_python_and_no_package_of_a_user_reaches_the_program(means: Means, monkeypatch, tmp_path) -> None:
    for folder in (tmp_path, tmp_path / f".local/lib/python3.{sys.version_info.minor}/site-packages"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "visitor.py").write_text("")
    for name, value in {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONOPTIMIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    program = (
        "import importlib.util, os, site, sys\n"
        "print([name for name in os.environ if name.startswith('PYTHON')], sys.flags.optimize)\n"
        "print([name for name in ('visitor', 'program') if importlib.util.find_spec(name)])\n"
        "print(bool(site.ENABLE_USER_SITE), '' in sys.path, os.getcwd() in sys.path)"
    )
    assert run(program, "", SMALL, means).stdout == "['PYTHONHASHSEED'] 0\n[]\nFalse False False\n"


def test_the_program_has_no_rights_and_gains_none(means: Means) -> None:
    program = (
        "import os\nstatus = open('/proc/self/status').read().split()\n"
        "print(status[status.index('CapEff:') + 1], status[status.index('NoNewPrivs:') + 1], os.getuid() != 0)"
    )
    result = run(program, "", SMALL, means)
    if "FileNotFoundError" in result.stderr:
        pytest.skip("this container lets nobody mount /proc")
    assert result.stdout == "0000000000000000 1 True\n"


ESCAPE = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
os.makedirs("own", exist_ok=True)
if library.unshare(0x10000000 | 0x00020000) == 0:  # a user namespace, and mounts in it
    print("has a namespace", library.mount(b"none", b"own", b"tmpfs", 0, b"size=100m"))
    with open("own/hoard", "wb") as file:
        for _ in range(60): file.write(bytes(1_000_000))
    print("kept", os.stat("own/hoard").st_size)
"""


def test_a_program_mounts_no_file_system_of_its_own(means: Means) -> None:
    """60 MB where 8 MiB are allowed: the kernel gives all rights inside a new user namespace."""
    if not protections(means)["gains_no_namespaces"]:
        pytest.skip("this kernel filters no system calls")
    result = run(ESCAPE, "", SMALL, means)
    assert (result.kind, result.stdout) == ("ok", ""), result.stderr


CALLS = {
    "memfd": "os.memfd_create('hoard')",
    "unshare": "call(unshare, 0x10000000)",
    "clone": "call(clone, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, 0, 0)",
    "shmget": "call(shmget, 0, 1 << 20, 0o1600)",
    "msgget": "call(msgget, 0, 0o1600)",
    "semget": "call(semget, 0, 32_000, 0o1600)",
    "send buffer": "__import__('socket').socketpair()[0].setsockopt(1, 7, 1 << 22)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(200))",
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_of_no_process_and_namespaces_are_refused(name: str, means: Means) -> None:
    if not protections(means)["gains_no_namespaces"]:
        pytest.skip("this kernel filters no system calls")
    numbers = system_calls._ARCHITECTURES[platform.machine()][1]
    program = (
        "import ctypes, os\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
        f"globals().update({numbers})\n"
        "def call(*arguments):\n    if library.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        f"try: {CALLS[name]}\nexcept OSError as error: print(error.errno)\nelse: print('allowed')"
    )
    result = run(program, "", SMALL, means)
    assert result.stdout == f"{errno.ENOSYS if name == 'clone3' else errno.EPERM}\n", result.stderr


def test_a_filter_has_jumps_that_end_inside_it() -> None:
    """8 bytes an instruction; the last one allows, and every path ends in a return."""
    for machine in ("x86_64", "aarch64"):
        program = system_calls._program(machine)
        lines = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
        for place, (_, true, false, _) in enumerate(lines):
            assert place + 1 + max(true, false) < len(lines) or lines[place][0] == 0x06
        assert lines[-1] == (0x06, 0, 0, 0x7FFF0000)


def test_a_connection_does_not_arrive(means: Means) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5).send(b'gold')"
        result = run(program, "", SMALL, means)
        if protections(means)["no_network"]:
            assert result.kind == "error"
            with pytest.raises(BlockingIOError):
                server.accept()
        else:  # what docs/sandbox.md says of a machine without namespaces
            assert result.kind == "ok"
            server.accept()[0].close()


def test_our_files_are_out_of_sight_and_the_systems_cannot_be_written(means: Means, tmp_path) -> None:
    (tmp_path / "gold").write_text("42")
    os.chmod(tmp_path / "gold", 0o666)
    looked = run(f"print(open({str(tmp_path / 'gold')!r}).read())", "", SMALL, means)
    if protections(means)["sees_only_system_files"]:
        assert looked.kind == "error" and "FileNotFoundError" in looked.stderr
    for path in ("/usr/lib/planted", "/planted", "/etc/planted"):
        wrote = run(f"open({path!r}, 'w')", "", SMALL, means)
        assert wrote.kind == "error" or os.geteuid() != 0
        assert not os.path.exists(path)


def test_other_processes_are_neither_seen_nor_signalled(means: Means) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as other:
        try:
            program = f"import os\nprint(os.path.exists('/proc/{other.pid}'))\nos.kill({other.pid}, 9)"
            result = run(program, "", SMALL, means)
            walls = protections(means)
            if walls["cannot_signal_others"]:
                assert result.kind == "error" and other.poll() is None
            if walls["sees_only_own_processes"]:
                assert result.stdout == "False\n"
        finally:
            other.kill()


def test_the_interpreter_of_the_harness_cannot_be_read(means: Means) -> None:
    """The first process of the sandbox knows the order; its child must not read that from its memory."""
    result = run("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')", "", SMALL, means)
    assert result.kind == "error"
    assert "PermissionError" in result.stderr or "FileNotFoundError" in result.stderr


def test_many_runs_at_once_do_not_disturb_each_other(remains) -> None:
    results: list[str] = []

    def one(i: int) -> None:
        results.append(run(f"import os\nfor _ in range(5):\n    os.fork()\nprint({i})", "", Limits(processes=64)).kind)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]  # 2^5 = 32 processes in each
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert results == ["ok"] * 6
    assert remains() == []


CALLER = """
import sys
sys.path.insert(0, {root!r})
from grpo.sandbox import run as sandbox
sandbox._ENVIRONMENT["TEST_MARK"] = {mark!r}
means = sandbox.Means(*{means!r})
program = "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\ntime.sleep(1000)"
sandbox.run(program, "", sandbox.Limits(1000), means)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_caller_is_killed(means: Means, number: int, remains) -> None:
    arguments = (means.namespaces, means.own_user, means.own_files, means.python)
    mark = sandbox._ENVIRONMENT["TEST_MARK"]
    code = CALLER.format(root=str(ROOT), mark=mark, means=arguments)
    caller = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    # The caller, its supervisor and two processes of the program; with namespaces two more between.
    wait_until(lambda: len([r for r in remains() if r.startswith("process")]) >= (6 if means.namespaces else 4))
    caller.send_signal(number)
    caller.wait(PATIENCE_S)
    wait_until(lambda: remains() == [])


def test_nothing_is_left_when_a_pool_kills_the_worker_that_waits(means: Means, remains) -> None:
    with Pool(1, 1.0, None) as pool:
        program = "import time; open('file', 'w'); time.sleep(1000)"
        late = pool.submit(run, program, "", Limits(1000), means).result(PATIENCE_S)
    assert late.kind == "timeout" and not late.of_answer
    assert remains() == []


def test_a_sandbox_that_cannot_be_set_up_is_not_the_programs_failure(unnamed: Means, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        run("pass", "", SMALL, unnamed)


@pytest.mark.slow
def test_a_fork_bomb_is_always_told_as_one(means: Means, remains) -> None:
    assert {run(PROGRAMS["fork bomb"].program, "", SMALL, means).kind for _ in range(50)} == {"processes"}
    assert remains() == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="needs another user")
def test_a_program_that_stops_its_own_supervisor_is_ended_from_outside(remains) -> None:
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)"
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(HOSTILE.parent)!r}]\nimport hostile\n"
        f"from grpo.sandbox.run import Limits, run\n"
        f"print(run({program!r}, '', Limits(wall_s=1), hostile.means_of_kind('no namespaces')).kind)"
    )
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", code], user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True
    )
    assert (done.stdout, remains()) == ("crash\n", [])


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="wall_s must be above 0, got 0"):
        Limits(wall_s=0)


def test_a_program_larger_than_its_disk_is_not_run() -> None:
    assert run("#" * 1_001, "", Limits(disk_bytes=1_000)).kind == "disk"


def test_a_machine_where_nothing_works_is_told_what_to_change(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "_candidates", lambda: [Means(False, False, False, "/no/such/python")])
    with pytest.raises(InputError, match="user namespaces must be allowed"):
        sandbox._means.__wrapped__()


def test_a_folder_is_measured_and_removed_however_deep(tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(bytes(10_000))  # three blocks of 4 KiB
    (folder / "empty").touch()  # counts as one
    (folder / "outside").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    assert scratch_dir.size(str(folder)) == 5 * 4096
    inside = os.open(folder, os.O_RDONLY)
    for _ in range(1_000):  # 1,000 x 5 characters are more than a path may have
        os.mkdir("deep", dir_fd=inside)
        inside, outer = os.open("deep", os.O_RDONLY, dir_fd=inside), inside
        os.close(outer)
    os.close(inside)
    assert scratch_dir.size(str(folder)) == float("inf")
    scratch_dir.remove(str(folder))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept"]
