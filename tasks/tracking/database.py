"""MLflow's database in a sqlite file: created under another name and renamed when it is complete.

MLflow creates its tables one by one and cannot continue with a database that a killed process left half-made.
`python -m tasks.tracking.database FILE` creates one before a server is started on it.
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
    """Create an empty database at `path` if there is none; one whose home was moved finds its files again. Safe against
    kills and concurrent calls."""
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
        for leftover in path.parent.glob(f"{new.name}*"):  # the file and the journal of a process that was killed
            leftover.unlink()
        _make(new)
        os.replace(new, path)
    finally:
        os.close(folder)


def make_private(path: Path) -> None:
    """Creates an empty file, unless there is one, that its owner alone can read; beside a group's folder (setgid) the
    group too. What SQLite adds beside a database has the database's rights."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        close_file(path)


def close_file(path: Path) -> None:
    """Denies other users a file. Its group may use it only if the folder is shared with a group (setgid)."""
    of_group = path.parent.stat().st_mode & stat.S_ISGID
    path.chmod(0o660 if of_group else 0o600)


def _make(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # Both log every step.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    make_private(path)
    store = SqlAlchemyStore(f"sqlite:///{path}", (path.parent / "mlartifacts").as_uri())
    store.engine.dispose()


if __name__ == "__main__":
    make_database(Path(sys.argv[1]))
