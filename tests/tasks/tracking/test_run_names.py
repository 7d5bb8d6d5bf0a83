"""Names of runs, and runs found again, in a real MLflow store."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.names import join_name

FLOW = {"r1flow.flow": "train_r1"}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """A store with three finished runs of the recipe r, and one of another recipe."""
    record = Tracking(default_uri(tmp_path_factory.mktemp("home")))
    for recipe, seed in (("r", 0), ("r", 1), ("r", 2), ("other", 0)):
        begin(record, recipe, seed)
    return record


def begin(record: Tracking, recipe: str, seed: int) -> str:
    run_id = record.recipe_run(recipe, join_name(f"{recipe} seed {seed}", ["rl.kl=5"]), {"seed": seed}, FLOW)
    record.finish(run_id, "FINISHED")
    return run_id


def test_a_name_says_what_is_set_against_the_file() -> None:
    assert join_name("tiny seed 0", []) == "tiny seed 0"
    assert join_name("tiny seed 1", ["rl.kl=0.001"]) == "tiny seed 1 · rl.kl=0.001"
    assert join_name("tiny seed 0", ["rl.kl=5", "sft.epochs=2", "rl.kl=0.001"]) == (
        "tiny seed 0 · rl.kl=0.001 · sft.epochs=2"
    )


def test_a_name_stays_short() -> None:
    assert join_name("r", ["a=1", "b=2", "c=3", "d=4"]) == "r · a=1 · b=2 · c=3 · 1 more"
    assert join_name("r", [f"{'x' * 90}=1", f"{'y' * 120}=2"]) == f"r · {'x' * 90}=1 · 1 more"
    assert join_name("r", [f"{'x' * 300}=1"]) == "r · 1 changes"
    assert join_name("r", [f"a={'x' * 300}"]) == f"r · a={'x' * 39}…"


def test_runs_are_found_by_their_beginning_and_from_the_end(record: Tracking) -> None:
    runs = record.reader.recipe_runs()
    find = record.reader.find
    assert find("latest") == find("latest~0") == find(runs[0].id) == runs[0]
    assert find("latest~3") == runs[3] == find(runs[3].id[:12])


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("latest~4", "there are 4 recipe runs; the oldest is latest~3"),
        ("latest~" + "9" * 5000, "there are 4 recipe runs; the oldest is latest~3"),
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
        known.add(begin(record, "r", len(known)))
    with pytest.raises(InputError, match="stands for [0-9]+ recipe runs: .*; give more characters"):
        record.reader.find(shared[0])


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`r1 run tiny` makes the first"):
        Tracking(default_uri(tmp_path)).reader.find("latest")
