"""MLflow's database in a sqlite file: created under a temporary name and renamed when complete.

MLflow creates its tables one by one, and cannot use a database that a killed process left half-created.
`python -m tasks.tracking.database FILE` creates one before a server starts on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import sys
from pathlib import Path

from tasks.tracking.moved_database import follow_move


def make_database(path: Path) -> None:
    """Creates an empty database at `path` if there is none. If there is one and its home was moved, updates its paths.
    Safe against kills and concurrent calls."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        follow_move(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            return
        new = path.with_name(f"{path.name}.new")
        for leftover in path.parent.glob(f"{new.name}*"):  # the file and the journal left by a killed process
            leftover.unlink()
        _make(new)
        os.replace(new, path)
    finally:
        os.close(folder)


def make_private(path: Path) -> None:
    """Creates an empty file that only its owner can read, or also the group if the folder is shared with a group
    (setgid). Does nothing if the file exists. Files that SQLite adds next to a database get the database's
    permissions."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        close_file(path)


def close_file(path: Path) -> None:
    """Denies other users access to a file. Its group keeps access only if the folder is shared with a group
    (setgid)."""
    of_group = path.parent.stat().st_mode & stat.S_ISGID
    path.chmod(0o660 if of_group else 0o600)


def _make(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # Both loggers report every step.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    make_private(path)
    store = SqlAlchemyStore(f"sqlite:///{path}", (path.parent / "mlartifacts").as_uri())
    store.engine.dispose()


if __name__ == "__main__":
    make_database(Path(sys.argv[1]))
