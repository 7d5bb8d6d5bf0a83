"""The password of the Prefect server that `r1 up` and `r1 ui` start: a file that only this user can read."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from flows.home import PREFECT_PASSWORD


def prefect_password(home: Path) -> str:
    """The password of this home's Prefect server, created on first use.

    Concurrent callers get the same password: the complete file appears through a link, which fails if another caller
    was first.
    """
    path = home / PREFECT_PASSWORD
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # A separate draft for each caller, because threads of one process call this too. mkstemp's files have mode
        # 0600.
        descriptor, draft = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"r1flow:{secrets.token_urlsafe(32)}")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        os.unlink(draft)
    return path.read_text()
