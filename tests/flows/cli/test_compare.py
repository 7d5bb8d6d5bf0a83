"""Reports and comparisons of real runs."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.cli import main as cli
from flows.cli.compare import aligned, show
from grpo.errors import InputError
from tasks.tracking.connection import default_uri
from tasks.tracking.tags import FLOW_RUN_TAG

pytestmark = pytest.mark.system

Command = Callable[..., int]


def test_tables_have_words_left_and_numbers_right() -> None:
    assert aligned([{"stage": "sft", "A": "7s"}, {"stage": "evaluate", "A": "12s"}]) == [
        "stage       A",
        "sft        7s",
        "evaluate  12s",
    ]


@pytest.fixture
def command(r1: Any, first_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Command:
    """A command of r1 in this process, in the session's home: MLflow is loaded once."""
    monkeypatch.setenv("R1FLOW_HOME", str(r1.home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(r1.home))  # MLflow leaves there what was last in use

    def run(*arguments: str) -> int:
        given = cli.parser().parse_args(arguments)
        return cli.COMMANDS[given.command](given)

    return run


@pytest.fixture(scope="module")
def fewer_samples(r1: Any, first_run: dict[str, Any]) -> dict[str, Any]:
    """The first run again, evaluated with half the samples of the same problems."""
    return r1.tiny("run", "--set", "evaluate.samples_per_problem=2")


def test_every_run_has_its_page_in_the_home_folder_and_in_mlflow(r1: Any, first_run: dict[str, Any]) -> None:
    page = Path(first_run["report"])
    text = page.read_text()
    assert r1.home in page.parents and page.stat().st_size < 3_000_000
    (attached,) = r1.home.glob(f"mlartifacts/tiny/{first_run['run_id']}/artifacts/report.html")
    assert attached.read_text() == text
    for heading in ("Checkpoints", "Pipeline", "Learning", "Data", "Judge and reward models", "Completions", "Lineage"):
        assert f"<h2>{heading}" in text
    for name, row in first_run["checkpoints"].items():
        assert f'<th scope="col" class="num">{name}</th>' in text and f"{100 * row['pass@1']:.1f}" in text
    assert re.findall('<th scope="row">([a-z_]+)</th><td class="ran">', text) == [
        s["name"] for s in first_run["stages"]
    ]


def test_a_server_that_ends_with_the_run_gets_no_pages(r1: Any, first_run: dict[str, Any]) -> None:
    flow_run = MlflowClient(default_uri(r1.home)).get_run(first_run["run_id"]).data.tags[FLOW_RUN_TAG]
    database = sqlite3.connect(r1.home / "prefect" / "prefect.db")
    assert database.execute("select key, data from artifact where flow_run_id = ?", [flow_run]).fetchall() == []
    assert database.execute("select count(*) from flow_run where id = ?", [flow_run]).fetchone() == (1,)


def test_runs_compared(
    command: Command, first_run: dict[str, Any], fewer_samples: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    ids = [first_run["run_id"], fewer_samples["run_id"]]
    assert command("compare", *ids, "--json", "--plot", str(tmp_path / "curves.png")) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["id"] for run in found["runs"]] == ids
    assert found["config"] == [{"field": "evaluate.samples_per_problem", "values": [4, 2]}]
    shared = {stage["stage"]: stage["shared"] for stage in found["stages"]}
    assert [name for name, same in shared.items() if not same] == ["evaluate", "report"]
    assert found["stages"][-2]["why"] == [[], ["samples_per_problem: 4 -> 2"]]
    rows = {(row["checkpoint"], row["metric"]): row for row in found["metrics"]}
    dev1, (of,) = rows["dev1", "pass@1"]["values"], rows["dev1", "pass@1"]["differences"]
    assert dev1 == [result["checkpoints"]["dev1"]["pass@1"] for result in (first_run, fewer_samples)]
    assert of["paired"] and of["problems"] == [24, 24] and of["low"] <= of["value"] <= of["high"]
    assert of["value"] == pytest.approx(dev1[1] - dev1[0])
    show(found)
    said = capsys.readouterr().out
    assert "evaluate.samples_per_problem  4  2" in said
    assert "differs: samples_per_problem: 4 -> 2" in said and "The problems are the same" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "latest"), "give two runs or more"),
        (("compare", "latest", "latest"), "name one run twice"),
        (("compare", "latest", "zzzz"), "no recipe run has an id that begins so; the newest are "),
        (("report", "latest~99"), "recipe runs; the oldest is latest~"),
        (("report", "latest", "--out", "FOLDER"), "give --out a file in a folder that can be written"),
    ],
)
def test_what_is_wrong_is_one_line(command: Command, arguments: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(InputError) as error:
        command(*(str(folder) if part == "FOLDER" else part for part in arguments))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [folder]  # nothing half-written beside it


def test_the_page_can_be_made_again_elsewhere(command: Command, first_run: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    assert command("report", first_run["run_id"], "--out", str(out)) == 0
    headings = [re.findall("<h[123].*", text) for text in (out.read_text(), Path(first_run["report"]).read_text())]
    assert headings[0] == headings[1] and len(headings[0]) > 15
