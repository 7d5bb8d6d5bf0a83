"""What `r1 compare` says, and that it says it when its plot fails or an artifact is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flows.cli import compare
from flows.cli import main as cli
from flows.run import report
from grpo.errors import InputError
from tasks.report.compare_plot import plot
from tasks.sft_data.statistics import STATISTICS
from tasks.store.manifest import MANIFEST, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.recipe_run import RecipeRun, StageRun, load_run
from tests.support.small_home import SmallHome, make_small_home


def result(*letters: str, **values: Any) -> dict[str, Any]:
    run = {"id": "0123456789", "name": "x", "recipe": "tiny", "status": "FINISHED"}
    empty: dict[str, Any] = {"config": [], "stages": [], "metrics": [], "confidence": 0.95, "plot": None}
    return {"runs": [run] * len(letters), **empty, "evaluations": [*letters], "reward_models": [*letters], **values}


def stage(name: str, why: list[list[str]], keys: list[str | None] | None = None) -> dict[str, Any]:
    of_runs = {"keys": keys or ["k"] * len(why), "seconds": [1.0] * len(why), "why": why}
    return {"stage": name, "shared": not any(why) and not keys, **of_runs}


def metric(name: str, differs: bool, **values: Any) -> dict[str, Any]:
    of = {"value": 0.1, "low": None, "high": None, "paired": False, "problems": None} if differs else None
    return {"checkpoint": "r1", "metric": name, "values": [0.25, 0.5], "differences": [of], **values}


def test_a_reason_has_the_letter_of_its_run_where_there_are_more_than_two(capsys: Any) -> None:
    reasons = [[], ["epochs: 2 -> 3", "other base"], ["stage version 1 -> 2"]]
    rows = [stage("sft", reasons), stage("base", [[], ["lr: 1 -> 2"], []], ["k", "l", None])]
    compare.show(result(*"ABC", stages=rows))
    said = capsys.readouterr().out
    assert "differs: B: epochs: 2 -> 3; other base | C: stage version 1 -> 2\n" in said
    assert "not in C; differs: B: lr: 1 -> 2\n" in said
    compare.show(result(*"AB", stages=[stage("sft", reasons[:2])]))
    assert "differs: epochs: 2 -> 3; other base\n" in capsys.readouterr().out


def test_curves_are_the_same_only_where_every_stage_is_shared(capsys: Any) -> None:
    for stages, said in (
        ([stage("sft", [[], []])], "all are the same"),
        ([stage("sft", [[], []]), stage("problems", [[], ["count: 1 -> 2"]])], "no stage that differs has any"),
        ([], "no stage that differs has any"),
    ):
        compare.show(result(*"AB", stages=stages))
        assert capsys.readouterr().out.endswith(f"Learning curves: {said}\n")


def test_k_is_named_where_it_is_not_the_same(capsys: Any) -> None:
    rows = [metric("pass@1", True), metric("pass@k", False, k=[4, 2]), metric("gsm8k/cons@k", False, k=[8, 16])]
    compare.show(result(*"AB", metrics=rows))
    said = capsys.readouterr().out
    assert "\nk is 4 in A, 2 in B: pass@k and cons@k are not comparable.\n" in said
    assert "\ngsm8k: k is 8 in A, 16 in B: pass@k and cons@k are not comparable.\n" in said
    compare.show(result(*"AB", metrics=[metric("pass@k", True, k=[4, 4])]))
    assert "not comparable" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "aligned", "first_round", "said"),
    [
        (["a", "b"], True, [], True),  # those of a later round, after a first round that is shared
        (["a", "a"], True, ["epochs: 1 -> 2"], False),
        (["a", None], False, ["epochs: 1 -> 2"], False),  # a run without reward models: nothing is compared
        (["a", "b"], False, ["epochs: 1 -> 2"], False),
    ],
)
def test_reward_models_are_those_that_scored_the_evaluation(
    models: list[Any], aligned: bool, first_round: list[str], said: bool, capsys: Any
) -> None:
    rows = [metric("pass@1", True), metric("alignment", aligned)]
    stages = [stage("reward_models", [[], first_round])]
    compare.show(result(*"AB", metrics=rows, stages=stages, reward_models=models))
    assert ("scored by its own reward models" in capsys.readouterr().out) == said


def command(home: SmallHome, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setenv("R1FLOW_HOME", str(home.path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(home.path))
    given = cli.parser().parse_args(arguments)
    return cli.COMMANDS[given.command](given)


def test_it_is_printed_though_the_plot_fails(
    small_home: SmallHome, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    asked = ("compare", small_home.first, small_home.second, "--plot", str(tmp_path / "x.nosuch"))
    with pytest.raises(InputError, match="give a .png in a folder that can be written"):
        command(small_home, monkeypatch, *asked)
    said = capsys.readouterr().out
    assert "reasoning_rl.kl_coef  0.001  0.01" in said and said.endswith("Learning curves: not drawn\n")
    with pytest.raises(InputError):
        command(small_home, monkeypatch, *asked, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["plot"] is None and found["plot_error"].startswith("--plot ") and len(found["metrics"]) > 0


def test_a_dollar_in_a_name_is_a_dollar(small_home: SmallHome, tmp_path: Path) -> None:
    reader = Tracking(default_uri(small_home.path)).reader
    runs = [load_run(reader, small_home.store, reader.find(run)) for run in (small_home.first, small_home.second)]
    path = tmp_path / "x.png"
    assert plot(reader, runs, [r"a $x^{$ b", r"c \$ $\nosuch$"], path) == path and path.stat().st_size > 10_000


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> SmallHome:
    """Two runs whose evaluations were changed on the disk: a number, and the end of the file."""
    home = make_small_home(tmp_path_factory.mktemp("damaged"))
    for manifest in home.path.glob("artifacts/evaluate/*/*/" + MANIFEST):
        table = manifest.parent / "table.json"
        table.write_text(table.read_text().replace("0.25", "0.99", 1))
    return home


@pytest.mark.parametrize("name", ["compare", "report"])
def test_a_damaged_evaluation_is_one_line(damaged: SmallHome, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = ("compare", damaged.first, damaged.second) if name == "compare" else ("report", damaged.first)
    with pytest.raises(InputError, match="damaged: the contents of table.json changed") as error:
        command(damaged, monkeypatch, *asked)
    assert str(error.value).count("\n") == 0 and not (damaged.path / "reports").exists()


@pytest.mark.parametrize(("stage", "file"), [("report", report.CONTENT), ("sft_data", STATISTICS)])
def test_what_a_page_reads_is_checked(stage: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    with Store(tmp_path).attempt(stage, artifact_key(stage, 1, {}, {})) as attempt:
        (attempt.out / file).write_text('{"table": {}, "lines": []}')
        made = attempt.publish(stage_version=1, config={})
    (made.path / file).write_text('{"table": {}, "lines": [}')
    with pytest.raises(InputError, match=f"damaged: .*{file}"):
        report.page_of(Mock(), RecipeRun(Mock(), {}, (StageRun(stage, Mock(), Mock(), made),)))


def test_damaged_problems_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = make_small_home(tmp_path_factory.mktemp("problems"))
    assert command(home, monkeypatch, "report", home.first) == 0
    (file,) = home.path.glob("artifacts/problems/*/*/held_out.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="damaged: the contents of held_out.parquet changed"):
        command(home, monkeypatch, "report", home.first)
