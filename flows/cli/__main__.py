"""`python -m flows.cli` and the program r1. Imports nothing by itself, so that Ctrl-C is heeded from the start."""

from __future__ import annotations

import sys
from typing import Any


def main() -> int:
    """Runs one command. Returns the exit code."""
    sys.unraisablehook = _unraisable
    try:
        from flows.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while importing; a command that runs says more
        print("stopped", file=sys.stderr)
        return 130
    except MemoryError:  # while importing, too
        print("error: memory ran out", file=sys.stderr)
        return 2


def _unraisable(unraisable: Any) -> None:
    """Python's report of errors in callbacks, save those of exhausted memory: the command fails of it, and says so."""
    if not isinstance(unraisable.exc_value, MemoryError):
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
