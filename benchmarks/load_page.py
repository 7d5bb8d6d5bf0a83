"""The page docs/measured/load.md: a section each of the benchmarks of load, which replace their own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from benchmarks.machine import machine

TITLE = "# Under load\n\nA section for each load. Its first line has the command, the commit and the machine.\n"


def measured_by(command: str) -> str:
    """First line of a section: command, commit and machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return f"`{command}`, at commit {commit}, on {machine()}."


def write_section(page: Path, section: str) -> None:
    """Writes a section, `## Title` and text, into the page: in the place of the one with its title, or at the end."""
    text = page.read_text() if page.exists() else TITLE
    title = section.partition("\n")[0]
    old = re.search(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    before, after = (text[: old.start()], text[old.end() :]) if old else (text, "")
    parts = [before, section, after]
    page.write_text("\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n")
