"""Stale artifacts, references to runs, and why keys differ: on stages that only write a file, real store and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.cli.why import why
from flows.home import store, tracking
from flows.stage_contract.references import artifact, resolve
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import ALONE, Context, Outcome, RunContext, Stage
from grpo.errors import InputError
from tasks.store.stale import stale_reasons
from tasks.tracking.tags import STALE_TAG


class Config(BaseModel):
    text: str = "hello"


ATTEMPTS: list[str] = []


def build(context: Context) -> Outcome:
    (context.out / "text").write_text(context.config.text)
    return Outcome()


def build_another(context: Context) -> Outcome:
    """Other bytes each time, as training on a GPU may make."""
    ATTEMPTS.append("")
    (context.out / "text").write_text(str(len(ATTEMPTS)))
    return Outcome()


FIRST = Stage("first", 1, (), build)
SECOND = Stage("second", 1, ("first",), build)
THIRD = Stage("third", 1, ("second", "first"), build)
RESTLESS = Stage("first", 1, (), build_another)


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    # One database for all: making one takes seconds.
    database = tmp_path_factory.getbasetemp() / "stale-mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")


def run(
    stage: Stage, text: str = "hello", recipe: str = "toy", force: bool = False, seed: int = 0, **inputs: str
) -> Any:
    where = RunContext(recipe=recipe, force=force)
    return run_stage(stage, Config(text=text), inputs, seed, where)


def chain(text: str = "hello", recipe: str = "toy") -> list[str]:
    """The keys of all three stages, each made from the one before."""
    first = run(FIRST, text, recipe)["key"]
    second = run(SECOND, recipe=recipe, first=first)["key"]
    return [first, second, run(THIRD, recipe=recipe, first=first, second=second)["key"]]


def test_what_was_made_from_an_older_artifact_is_stale_until_it_is_made_again() -> None:
    old, *_ = keys = chain()
    assert stale_reasons(store()) == {}
    new = run(FIRST, "other")
    was = store().resolve(old).digest
    reasons = stale_reasons(store())
    assert reasons == {
        keys[1]: f"first was {was[:12]}, now is {new['digest'][:12]} (toy, seed 0)",
        keys[2]: f"first was {was[:12]}, now is {new['digest'][:12]} (toy, seed 0)",
    }
    second = run(SECOND, first=new["key"])["key"]
    assert set(stale_reasons(store())) == {keys[2]}
    run(THIRD, first=new["key"], second=second)
    assert stale_reasons(store()) == {}


def test_an_input_that_is_stale_makes_stale() -> None:
    _, second, _ = chain()
    last = Stage("last", 1, ("second",), build)
    key = run(last, second=second)["key"]
    run(FIRST, "other")
    assert stale_reasons(store())[key] == "second is stale (toy, seed 0)"


def test_going_back_to_older_artifacts_makes_them_current() -> None:
    chain()
    run(FIRST, "other")
    assert len(stale_reasons(store())) == 2
    chain()  # all of it is reused
    assert stale_reasons(store()) == {}


def test_the_same_bytes_make_nothing_stale_and_other_bytes_do() -> None:
    chain()
    run(FIRST, force=True)
    assert stale_reasons(store()) == {}
    run(RESTLESS, force=True)
    assert len(stale_reasons(store())) == 2


def test_another_recipe_or_seed_makes_nothing_stale() -> None:
    keys = chain()
    assert chain(recipe="copy") == keys
    run(FIRST, "other", recipe="copy/of")
    run(FIRST, "other", seed=1)
    assert stale_reasons(store()) == {}
    run(FIRST, "other", recipe="copy")
    assert (
        all(why.endswith("(copy, seed 0)") for why in stale_reasons(store()).values())
        and len(stale_reasons(store())) == 2
    )


def test_a_stage_run_by_itself_belongs_to_the_recipe_of_its_inputs() -> None:
    first, _, third = chain()
    run(SECOND, "other", recipe=ALONE, first=first)
    assert set(stale_reasons(store())) == {third}
    run(FIRST, "other", recipe=ALONE)  # nothing says whose it is
    assert set(stale_reasons(store())) == {third}


def test_mlflow_has_the_tag_as_long_as_it_is_true() -> None:
    keys = chain()
    runs = {key: store().resolve(key).mlflow_run_id for key in keys}
    run(FIRST, "other")
    assert tracking().tagged(STALE_TAG) == {runs[key]: stale_reasons(store())[key] for key in keys[1:]}
    chain()
    assert tracking().tagged(STALE_TAG) == {}


def test_a_reference_names_a_run_and_a_stage() -> None:
    first, second, third = chain()
    parent = tracking().recipe_run("toy", "a run", {}, {})
    run_stage(THIRD, Config(), {"first": first, "second": second}, 0, RunContext(recipe="toy", parent_run_id=parent))
    # The run reused third, which was made from the others.
    assert [resolve(f"{parent}:{stage}").ref.key for stage in ("third", "second", "first")] == [third, second, first]
    assert artifact(f"{parent[:12]}:third").key == third
    assert artifact(f"{store().resolve(second).mlflow_run_id}:first").key == first
    for reference, said in (
        (f"{parent}:fourth", "the run has no artifact of stage 'fourth'; it has first, second, third"),
        ("0123456789ab:first", "has no run whose id begins so"),
        ("tiny:first", "'tiny' is no MLflow run"),
        ("latest", "of which stage"),
    ):
        with pytest.raises(InputError, match=said):
            artifact(reference)


def test_latest_alone_is_of_the_inputs_own_stage() -> None:
    run(FIRST, "old")
    new = run(FIRST, "new")
    made = run(SECOND, first="latest")
    assert store().resolve(made["key"]).inputs["first"].key == new["key"]


def test_why_names_fields_inputs_and_versions_all_the_way_down() -> None:
    _, _, old = chain()
    first = run(FIRST, "other")["key"]
    second = run(Stage("second", 2, ("first",), build), first=first)["key"]
    new = run(THIRD, first=first, second=second)["key"]
    known = {m.digest: m for m in store().list()}
    found = why(artifact(old), artifact(new), known)
    assert [entry["said"] for entry in found] == ["input second changed", "input first changed"]
    assert [entry["said"] for entry in found[0]["why"]] == ["input first changed", "stage version 1 -> 2"]
    assert [entry["said"] for entry in found[0]["why"][0]["why"]] == ["text: hello -> other"]
    assert "why" not in found[1]  # it was said above
    with pytest.raises(InputError, match="of stage 'first', .* of 'second'; give two of one"):
        why(artifact(first), artifact(second), known)
