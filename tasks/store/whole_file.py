"""Atomic file writes: a reader sees a whole file or none."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a temporary file next to `path` and renames it, so that neither a kill nor a concurrent reader leaves or
    sees half a file. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
