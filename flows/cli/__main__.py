"""`python -m flows.cli` and the program r1. Imports nothing at module level, so that Ctrl-C works from the start."""

from __future__ import annotations

import sys
from typing import Any


def main() -> int:
    """Runs one command. Returns the exit code."""
    sys.unraisablehook = _unraisable
    try:
        from flows.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # during imports; a running command says more
        print("stopped", file=sys.stderr)
        return 130
    except MemoryError:  # also during imports
        print("error: memory ran out", file=sys.stderr)
        return 2


def _unraisable(unraisable: Any) -> None:
    """Prints Python's report of an error in a callback, except for exhausted memory: then the command fails and says
    so."""
    if not isinstance(unraisable.exc_value, MemoryError):
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.exit(main())
