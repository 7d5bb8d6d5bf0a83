"""MLflow's database in a file: made beside its place and put there whole.

MLflow makes its tables one by one and cannot go on with a database of which a killed process left half.
`python -m tasks.tracking.database FILE` makes one before a server is started on it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from pathlib import Path


def make_database(path: Path) -> None:
    """Make an empty database at `path`, if there is none. Safe against kills and other processes that do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            return
        new = path.with_name(f"{path.name}.new")
        for left in path.parent.glob(f"{new.name}*"):  # of a process that was killed: the file and its journal
            left.unlink()
        _make(new)
        os.replace(new, path)
    finally:
        os.close(folder)


def _make(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    # They tell each step of it.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    store = SqlAlchemyStore(f"sqlite:///{path}", (path.parent / "mlartifacts").as_uri())
    store.engine.dispose()


if __name__ == "__main__":
    make_database(Path(sys.argv[1]))
