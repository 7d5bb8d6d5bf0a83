"""Exhausted memory, told from other failures."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

from grpo.processes.memory import CANNOT_LOAD, says_out_of_memory


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
        "from grpo.processes.memory import says_out_of_memory\n"
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


def test_loading_without_end_is_ended() -> None:
    """OpenBLAS's loop, which lets no Python code run, is stood in for by one that matches for ever; what comes after
    the block has no limit."""
    program = (
        "import re, sys, time\n"
        "from grpo.processes import memory\n"
        "memory.LOADING_S = 0.2\n"
        "with memory.limited_loading(): pass\n"
        "while time.process_time() < 0.5: pass\n"
        "print('loaded', flush=True)\n"
        "with memory.limited_loading(): re.match('(a|a)*$', 'a' * 100 + 'b')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-CANNOT_LOAD, "loaded\n"), done.stderr
