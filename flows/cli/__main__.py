"""`python -m flows.cli` and the program r1. Imports nothing by itself, so that Ctrl-C is heeded from the start."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs one command. Returns the exit code."""
    try:
        from flows.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while importing; a command that runs says more
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
