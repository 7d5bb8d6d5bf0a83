"""A home that moves with `mv`: MLflow finds the files of its runs at the new place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.store.manifest import artifact_key
from tasks.store.store import Store
from tasks.tracking.client import RECIPE_FILE, Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.moved_database import follow_move


@pytest.mark.parametrize("move", [Path.rename, shutil.copytree], ids=["mv", "cp"])
def test_a_home_moves(tmp_path: Path, move) -> None:
    old, new = tmp_path / "my home", tmp_path / "other_place"
    record = Tracking(default_uri(old))
    run = record.recipe_run("tiny", "run", {"seed": 3}, {})
    with Store(old).attempt("sft", artifact_key("sft", 1, {}, {})) as attempt:
        (attempt.out / "weights").write_text("w")
        made = attempt.publish(stage_version=1, config={})
    record.models.log(run, made, "sft", 1)
    record.models.set_alias("tiny", "champion", made)
    record.finish(run, "FINISHED")
    record.client  # noqa: B018
    move(old, new)
    if move is not Path.rename:  # the copy must not read the files of the original
        shutil.rmtree(old)
    moved = Tracking(default_uri(new))
    assert moved.reader.read_json(run, RECIPE_FILE) == {"seed": 3}
    assert moved.client.get_run(run).info.artifact_uri.startswith((new / "mlartifacts").as_uri())
    champion = moved.models.by_alias("champion", None, Store(new))
    assert champion == made and champion.path == new / made.path.relative_to(old)
    again = moved.recipe_run("tiny", "run", {"seed": 4}, {})
    assert moved.reader.read_json(again, RECIPE_FILE) == {"seed": 4}
    assert not old.exists()
    assert not follow_move(new / "mlflow.db")


def test_files_at_a_place_of_the_users_stay_there(tmp_path: Path) -> None:
    import sqlite3

    database = tmp_path / "mlflow.db"
    (tmp_path / "mlartifacts").mkdir()
    with sqlite3.connect(database) as connection:
        connection.execute("create table experiments (experiment_id integer, artifact_location text)")
        connection.execute("insert into experiments values (0, 's3://bucket/mlartifacts/0')")
    assert not follow_move(database)
    assert not follow_move(tmp_path / "none.db") and not (tmp_path / "none.db").exists()
