"""Loading of libraries: its limit, and what the garbage collector leaves alone."""

from __future__ import annotations

import subprocess
import sys

from grpo.processes.loading import CANNOT_LOAD


def test_loading_without_end_is_ended() -> None:
    """OpenBLAS's loop, which lets no Python code run, is stood in for by one that matches for ever; what comes after
    the block has no limit."""
    program = (
        "import re, sys, time\n"
        "from grpo.processes import loading\n"
        "loading.LOADING_S = 0.2\n"
        "with loading.limited_loading(): pass\n"
        "while time.process_time() < 0.5: pass\n"
        "print('loaded', flush=True)\n"
        "with loading.limited_loading(): re.match('(a|a)*$', 'a' * 100 + 'b')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-CANNOT_LOAD, "loaded\n"), done.stderr


def test_what_is_loaded_once_is_never_collected() -> None:
    """A list that holds itself is garbage that only the collector frees: not what the block made, but what came later,
    also if the block has failed."""
    program = (
        "import gc, weakref\n"
        "from grpo.processes.loading import never_collected\n"
        "class Loop(list): pass\n"
        "def lost():\n"
        "    loop = Loop()\n"
        "    loop.append(loop)\n"
        "    return weakref.ref(loop)\n"
        "try:\n"
        "    with never_collected():\n"
        "        kept, enabled = lost(), gc.isenabled()\n"
        "        raise ImportError\n"
        "except ImportError: later = lost()\n"
        "gc.collect()\n"
        "print(enabled, gc.isenabled(), kept() is not None, later() is None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False True True True\n", done.stderr
