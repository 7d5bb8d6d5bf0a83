"""`flows.runs`: runs as frames, and the notebook that goes through one, executed on a small home."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flows import runs
from grpo.errors import InputError
from tasks.tracking.connection import default_uri
from tests.support.small_home import TABLES, SmallHome

NOTEBOOK = Path(__file__).parents[2] / "docs" / "run.ipynb"


@pytest.fixture(autouse=True)
def used(small_home: SmallHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(small_home.path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(small_home.path))


def test_a_row_a_run(small_home: SmallHome) -> None:
    found = runs.table()
    assert list(found.index) == [small_home.second, small_home.first]
    assert list(found["overrides"]) == ["reasoning_rl.kl_coef=0.01", ""]
    assert set(found["status"]) == {"finished"} and list(runs.table("other").index) == []
    assert (found["began"].dt.tz_convert("UTC") <= pd.Timestamp.now("UTC")).all()


def test_stages_and_their_counts(small_home: SmallHome) -> None:
    run = runs.load("latest")
    assert run.id == small_home.second and run.config["reasoning_rl"]["kl_coef"] == 0.01
    stages = run.stages()
    assert dict(stages["status"]) == {
        "problems": "reused", "cold_start_sft": "reused", "reasoning_rl": "ran", "evaluate": "ran"
    }  # fmt: skip
    assert set(stages["seconds"]) == {7.0} and stages.loc["reasoning_rl", "steps"] == 3
    assert stages.loc["problems", "key"] == small_home.store.resolve("latest:problems").key
    assert run.counts().loc[("problems", "rows"), "value"] == 4


def test_the_closing_table_has_bounds_as_columns() -> None:
    found = runs.load("latest~1").checkpoints()
    assert list(found.index) == ["dev1", "dev2"]
    assert list(found.loc["dev2", ["pass@1", "pass@1_low", "pass@1_high"]]) == [0.5, 0.25, 0.75]


def test_curves_of_a_stage_that_ran_and_of_one_that_was_reused(small_home: SmallHome) -> None:
    found = runs.load("latest").curves("reasoning_rl")
    assert list(found.index) == [1, 2, 3] and list(found["reward"]) == [0.25, 0.5, 0.75]
    assert list(found["kl"]) == pytest.approx([0.01, 0.02, 0.03])
    assert runs.load("latest").curves("problems").empty


def test_data_and_samples() -> None:
    run = runs.load("latest")
    assert run.tables("problems") == ["held_out", "train"]
    assert run.tables("evaluate") == ["samples/dev1", "samples/dev2"]
    held_out = run.data("problems", "held_out")
    assert list(held_out["id"]) == ["p0", "p1", "p2", "p3"] and held_out["metadata"][3] == {"size": 3}
    samples = run.samples("dev2")
    assert len(samples) == 8 and samples["reward_accuracy"].mean() == TABLES[0.01]["dev2"]["pass@1"]
    for wrong, said in (
        (lambda: run.data("problems"), "give the name of a table; there are: held_out, train"),
        (lambda: run.samples("r1"), "there are: samples/dev1, samples/dev2"),
        (lambda: run.curves("sft"), "has no stage 'sft'; it has: problems, cold_start_sft, reasoning_rl, evaluate"),
        (lambda: runs.load("zz"), "no recipe run has an id that begins so"),
    ):
        with pytest.raises(InputError, match=said):
            wrong()


def test_test_sets_of_several_years_are_tables_of_their_own(tmp_path: Path) -> None:
    names = ["sets/aime-2024", "sets/aime-2025", "train", "samples/00000", "samples/00001"]
    shards = ["examples/part-00000", "examples/part-00001", "chains/shard-00000", "step_labels/labels-00000"]
    for name in [*names, *shards]:
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    counts = {name: len(files) for name, files in runs._tables(tmp_path).items()}
    shard_counts = {"samples": 2, "examples": 2, "chains": 1, "step_labels": 1}
    assert counts == {"sets/aime-2024": 1, "sets/aime-2025": 1, "train": 1, **shard_counts}


def executed(notebook: Path) -> list[Any]:
    """Runs the cells of a notebook in one namespace, as Jupyter does. Returns what each code cell would show."""
    cells = json.loads(notebook.read_text())["cells"]
    namespace: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            body = ast.parse("".join(cell["source"])).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), cell["id"], "exec"), namespace)
            expression = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
            shown.append(eval(compile(expression, cell["id"], "eval"), namespace) if expression else None)
    return shown


def test_the_notebook_runs_from_data_to_answers(monkeypatch: pytest.MonkeyPatch, small_home: SmallHome) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    with contextlib.redirect_stdout(None):
        shown = executed(NOTEBOOK)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert len(cells) >= 15 and not any(cell.get("outputs") for cell in cells)
    wrong, gained, compared = shown[-3:]
    assert dict(wrong.loc["p3"]) == {"prompt": "compute 3 + 1", "right": "4", "said": "0"} and list(wrong.index) == [
        "p3"
    ]
    assert dict(gained) == {"p1": 1.0, "p2": 1.0, "p0": 0.0, "p3": 0.0}
    assert list(compared.index) == [small_home.second[:8], small_home.first[:8]]
    assert list(compared["dev2"]) == [0.75, 0.5]
