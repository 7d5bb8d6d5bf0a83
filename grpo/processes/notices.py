"""Messages from a trainer to the user of the command that started it; all other output stays in the trainer's log."""

from __future__ import annotations

import sys

PREFIX = "notice: "


def notice(text: str) -> None:
    """Writes one line to stderr (the trainer's log), from which the launcher forwards it while the trainer runs."""
    print(PREFIX + " ".join(text.split()), file=sys.stderr, flush=True)
