"""Text of models and data sets on a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text with its control characters, all but tab and newline, as U+FFFD. A terminal would obey them: escape
    sequences move the cursor, hide lines and change the clipboard."""
    return _CONTROL.sub("\ufffd", text)
