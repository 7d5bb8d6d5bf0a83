"""Repairs MLflow's SQLite database after its home was moved or copied: MLflow stores absolute paths of its files."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

_COLUMNS = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "logged_models": ("artifact_location",),
    "model_versions": ("source", "storage_location"),
}


def follow_move(database: Path) -> bool:
    """Replaces the former `mlartifacts` folder in the database's paths with the one that is next to the database now.
    Returns whether any path changed."""
    folder = database.resolve().parent / "mlartifacts"
    if not database.exists() or not folder.is_dir():
        return False
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        if (old := _old_folder(connection, folder)) is None:
            return False
        for table, columns in _COLUMNS.items():
            present = {row[1] for row in connection.execute(f"pragma table_info({table})")}
            for column in present.intersection(columns):
                # Not LIKE, because a path may contain wildcard characters.
                connection.execute(
                    f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?",
                    (folder.as_uri() + "/", len(old) + 1, len(old), old),
                )
    return True


def _old_folder(connection: sqlite3.Connection, folder: Path) -> str | None:
    """The URI of the former folder, ending with a slash; None if the folder is unchanged or not one of ours."""
    try:
        row = connection.execute("select artifact_location from experiments where experiment_id = 0").fetchone()
    except sqlite3.OperationalError:  # no tables yet
        return None
    location = row[0] if row and isinstance(row[0], str) else ""
    if not location.startswith("file://") or not location.endswith(f"/{folder.name}/0"):
        return None
    old = Path(unquote(urlsplit(location).path)).parent
    return None if old.resolve() == folder else location.removesuffix("0")
