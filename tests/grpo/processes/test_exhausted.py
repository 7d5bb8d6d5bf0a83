"""Telling a full disk and exhausted memory from other failures."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.processes.exhausted import is_full, says_full, says_out_of_memory

ROOT = Path(__file__).parents[3]
IN_TMPFS = "mount -t tmpfs -o size=2m full $1 && touch $1/trainer.log && dd if=/dev/zero of=$1/x bs=4k 2>/dev/null; "
"""A shell script: a disk of two MB that is filled to the last byte, with an empty log on it."""


def in_full_disk(folder: Path, code: str) -> str:
    """What Python code prints, run with a full disk mounted at `folder`."""
    command = ["unshare", "-Urm", "sh", "-c", IN_TMPFS + 'exec "$2" -c "$3"', "sh", folder, sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no tmpfs in a user namespace here")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_error_says_so_by_its_code_its_words_or_its_cause() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert says_full(full) and says_full(OSError(errno.EDQUOT, "quota"))
    assert says_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not says_full(OSError(errno.EIO, "Input/output error"))
    wrapped = RuntimeError("cannot save")
    wrapped.__cause__ = full
    assert says_full(wrapped)


def test_a_folder_with_space_is_not_full(tmp_path: Path) -> None:
    assert not is_full(tmp_path / "not" / "there")


def test_the_command_says_it_in_one_line_whatever_failed(tmp_path: Path) -> None:
    code = (
        "import os, flows.cli.main as m; os.environ['R1FLOW_HOME'] = "
        f"{str(tmp_path)!r}; m.prepare_environment = lambda: None\n"
        "def server_error(args): raise RuntimeError('500 Internal Server Error')\n"
        "m.COMMANDS['stages'] = server_error; import sys; sys.stderr = sys.stdout; print(m.main(['stages']))"
    )
    said = f"error: no space left on {tmp_path}: free some or move the home folder with R1FLOW_HOME\n2\n"
    assert in_full_disk(tmp_path, code) == said


def test_errors_of_exhausted_memory() -> None:
    wrapped = RuntimeError("the database failed")
    wrapped.__cause__ = MemoryError()
    library = "libtorch_cpu.so: failed to map segment from shared object"
    for error in (MemoryError(), wrapped, OSError(errno.ENOMEM, "fork"), ImportError(library)):
        assert says_out_of_memory(error)
    for error in (RuntimeError("the database failed"), OSError(errno.ENOSPC, "write"), ImportError("no module")):
        assert not says_out_of_memory(error)


def test_a_real_limit_is_recognized() -> None:
    """1 GB within 300 MB."""
    program = (
        "from grpo.processes.exhausted import says_out_of_memory\n"
        "try: bytearray(10**9)\n"
        "except BaseException as error: print(says_out_of_memory(error))"
    )
    limit = 300_000_000
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "True\n", done.stderr
