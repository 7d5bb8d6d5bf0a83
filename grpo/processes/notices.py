"""Lines that a trainer has for the user of the command that started it; its other output stays in its log."""

from __future__ import annotations

import sys

PREFIX = "notice: "


def notice(text: str) -> None:
    """Writes one line to stderr, the trainer's log, from where the launcher hands it on while the trainer runs."""
    print(PREFIX + " ".join(text.split()), file=sys.stderr, flush=True)
