"""A home that moves with `mv`: the servers that `r1 up` and `r1 ui` start find MLflow's files at the new place."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from flows.installation.services import sqlite


def test_servers_start_on_a_database_that_follows_the_move(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "mlartifacts").mkdir(parents=True)
    files = (old / "mlartifacts").as_uri()
    with contextlib.closing(sqlite3.connect(old / "mlflow.db")) as database, database:
        database.execute("create table experiments (experiment_id integer, artifact_location text)")
        database.execute("create table runs (run_uuid text, artifact_uri text)")
        database.execute("insert into experiments values (0, ?)", [f"{files}/0"])
        database.execute("insert into runs values ('a', ?)", [f"{files}/1/a/artifacts"])
    old.rename(new)
    for _ in range(2):  # both servers ask for it
        assert sqlite(new).mlflow == f"sqlite:///{new}/mlflow.db"
    with contextlib.closing(sqlite3.connect(new / "mlflow.db")) as database:
        (uri,) = database.execute("select artifact_uri from runs").fetchone()
    assert uri == f"{(new / 'mlartifacts').as_uri()}/1/a/artifacts"
