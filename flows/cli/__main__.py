"""`python -m flows.cli` and the program r1. Imports nothing at module level, so that Ctrl-C works from the start."""

from __future__ import annotations

import gc
import sys
from typing import Any

YOUNG_OBJECTS = 50_000
"""New objects until the garbage collector runs. Libraries make hundreds of thousands that stay; with Python's threshold
of 700, a sixth of a short command's time is spent on looking at them again."""


def main() -> int:
    """Runs one command. Returns the exit code."""
    sys.unraisablehook = _unraisable
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    try:
        import logging

        logging.raiseExceptions = False  # a line that cannot be logged, for want of memory, prints no traceback
        from flows.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # during imports; a running command says more
        print("stopped", file=sys.stderr)
        return 130
    except MemoryError:  # also during imports
        print("error: memory ran out", file=sys.stderr)
        return 2
    finally:
        gc.freeze()  # Python looks at all objects again when it exits, which takes half a second


def _unraisable(unraisable: Any) -> None:
    """Prints Python's report of an error in a callback, with two exceptions.

    Exhausted memory: then the command fails and says so. A signal: its handler raises in whatever code the main thread
    runs, and Python drops the exception if that is a destructor or a callback. The signal would be lost and the command
    would go on, so it is sent again.
    """
    error = unraisable.exc_value
    if isinstance(error, MemoryError):
        return
    if isinstance(error, (Exception, GeneratorExit)) or error is None:
        sys.__unraisablehook__(unraisable)
        return
    import os
    import signal
    import threading

    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
    # From another thread and a little later: the destructor or callback has ended by then.
    again = threading.Timer(0.05, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    sys.exit(main())
