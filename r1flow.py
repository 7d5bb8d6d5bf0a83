"""The program r1, and `python -m r1flow`: looks first whether other folders hide the packages of r1flow."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("grpo", "tasks", "flows")
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs one command. Returns the exit code, 2 if a package is hidden."""
    for name in PACKAGES:
        if hiding := _hiding(name):
            print(
                f"error: {hiding} hides the package {name!r} of r1flow in {HERE}: rename it, "
                "or take the folder that it lies in out of PYTHONPATH or run r1 in another one",
                file=sys.stderr,
            )
            return 2
    from flows.cli.__main__ import main as run

    return run()


def _hiding(name: str) -> str | None:
    """The folder or file that Python imports in place of our package; None if it imports ours."""
    spec = find_spec(name)
    if spec is None:
        return None  # an incomplete installation; importing it says what is missing
    places = [*(spec.submodule_search_locations or []), spec.origin]
    found = next(str(place) for place in places if place)
    return None if Path(found).resolve() == HERE / name else str(Path(found).absolute())


if __name__ == "__main__":
    sys.exit(main())
