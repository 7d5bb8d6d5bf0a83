"""The page docs/measured/load.md: a section each of the benchmarks of load, which replace their own."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.arguments import write_output

TITLE = "# Under load\n\nA section for each load. Its first line has the command, the commit and the machine.\n"


def write_section(page: Path, section: str) -> None:
    """Writes a section, `## Title` and text, into the page: in the place of the one with its title, or at the end."""
    text = page.read_text() if page.exists() else TITLE
    title = section.partition("\n")[0]
    old = re.search(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    before, after = (text[: old.start()], text[old.end() :]) if old else (text, "")
    parts = [before, section, after]
    write_output(page, "\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n")
