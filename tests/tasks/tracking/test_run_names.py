"""Names of runs, and runs found again, in a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.tracking.client import RECIPE_FILE, Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.run_names import join_name, name_run

FLOW = {"r1flow.flow": "train_r1"}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """A store with three finished runs of the recipe r, and one of another recipe."""
    record = Tracking(default_uri(tmp_path_factory.mktemp("home")))
    for recipe, config in (
        ("r", {"rl": {"kl": 0.001}, "seed": 0}),
        ("r", {"rl": {"kl": 0.01}, "seed": 0}),
        ("r", {"rl": {"kl": 0.01}, "seed": 1}),
        ("other", {"rl": {"kl": 5}, "seed": 0}),
    ):
        begin(record, recipe, config)
    return record


def begin(record: Tracking, recipe: str, config: dict) -> str:
    called = name_run(
        record.reader, recipe, "train_r1", FLOW, config, RECIPE_FILE, config["seed"], first=["rl.kl=0.001"]
    )
    run_id = record.recipe_run(recipe, called.name, config, FLOW | called.tags)
    record.finish(run_id, "FINISHED")
    return run_id


def test_a_name_says_what_differs_from_the_run_before(record: Tracking) -> None:
    runs = record.reader.recipe_runs()
    assert [run.name for run in runs] == [
        "train_r1 seed 0 rl.kl=0.001",  # of the other recipe: its first run, as it was asked for
        "train_r1 seed 1",
        "train_r1 seed 0 rl.kl=0.01",
        "train_r1 seed 0 rl.kl=0.001",
    ]
    assert runs[1].tags["r1flow.before"] == runs[2].id and runs[1].tags["r1flow.differs"] == ""
    assert runs[2].tags["r1flow.differs"] == "rl.kl=0.01"


def test_a_stage_is_named_by_the_inputs_that_changed(record: Tracking) -> None:
    names = []
    for digest in ("a" * 64, "b" * 64):
        stage = {"r1flow.stage": "sft"}
        called = name_run(record.reader, "r", "sft", stage, {"seed": 0}, "config.json", 0, {"base": digest})
        record.finish(record.stage_run(None, "r", called.name, {"seed": 0}, stage | called.tags), "FINISHED")
        names.append(called.name)
    assert names == ["sft seed 0", "sft seed 0 other base"]


def test_a_name_stays_short() -> None:
    assert join_name("r", ["a=1", "b=2", "c=3", "d=4"]) == "r a=1 b=2 c=3 and 1 more"
    assert join_name("r", ["x" * 150, "y" * 150]) == f"r {'x' * 150} and 1 more"
    assert join_name("r", ["x" * 300]) == "r and 1 changes"


def test_runs_are_found_by_their_beginning_and_from_the_end(record: Tracking) -> None:
    runs = record.reader.recipe_runs()
    find = record.reader.find
    assert find("latest") == find("latest~0") == find(runs[0].id) == runs[0]
    assert find("latest~3") == runs[3] == find(runs[3].id[:12])


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("latest~4", "there are 4 recipe runs; the oldest is latest~3"),
        ("zzz", "no recipe run has an id that begins so; the newest are "),
        ("latest~x", "no recipe run has an id that begins so"),
        ("", "no recipe run has an id"),
    ],
)
def test_an_unknown_run_is_one_line(record: Tracking, reference: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        record.reader.find(reference)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_ambiguous_run_lists_what_it_may_be(record: Tracking) -> None:
    known = {run.id for run in record.reader.recipe_runs()}
    while not (shared := [one for one in {run[0] for run in known} if sum(run[0] == one for run in known) > 1]):
        known.add(begin(record, "r", {"seed": len(known)}))
    with pytest.raises(InputError, match="stands for [0-9]+ recipe runs: .*; give more characters"):
        record.reader.find(shared[0])


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`r1 run tiny` makes the first"):
        Tracking(default_uri(tmp_path)).reader.find("latest")
