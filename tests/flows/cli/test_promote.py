"""The model registry against a real MLflow store in a sqlite file, and artifacts of a real store."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.cli.main import parser
from flows.cli.promote import run
from flows.run.model_aliases import move_aliases
from grpo.errors import InputError
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def tracking(home: Path) -> Tracking:
    return Tracking(default_uri(home))


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def publish(store: Store, stage: str, seed: int = 0) -> Manifest:
    config = {"seed": seed}
    with store.attempt(stage, artifact_key(stage, 1, config, {})) as attempt:
        (attempt.out / "weights").write_text(f"{stage} {seed}")
        return attempt.publish(stage_version=1, config=config)


def logged(tracking: Tracking, store: Store, recipe: str, stage: str, seed: int = 0) -> Manifest:
    made = publish(store, stage, seed)
    tracking.models.log(tracking.stage_run(None, recipe, stage, {}, {}), made, stage, 1)
    return made


def test_an_alias_leads_to_the_artifact_and_moves(tracking: Tracking, store: Store) -> None:
    first, second = (logged(tracking, store, "moving", "sft", seed) for seed in (0, 1))
    with pytest.raises(
        InputError, match="dev3@moving: no registered model has this alias; `r1 promote REF --alias dev"
    ):
        tracking.models.by_alias("dev3", "moving", store)
    tracking.models.set_alias("moving", "dev3", first)
    assert tracking.models.by_alias("dev3", "moving", store) == first
    assert tracking.models.set_alias_now("moving", "dev3", second) == "2"
    assert tracking.models.by_alias("dev3", None, store) == second
    tracking.models.set_alias("moving", "qwen2.5", first)  # a student; MLflow takes no dot
    assert tracking.models.by_alias("qwen2.5", "moving", store) == first
    assert tracking.models.recipes_with(first) == ["moving"]


def test_a_checkpoint_that_another_recipe_made_gets_a_version_of_its_own(tracking: Tracking, store: Store) -> None:
    made = logged(tracking, store, "maker", "alignment_rl", 7)
    tracking.models.set_alias("maker", "shared", made)
    tracking.models.set_alias("user", "shared", made)
    assert tracking.models.recipes_with(made) == ["maker", "user"]
    assert tracking.models.by_alias("shared", "user", store) == made
    with pytest.raises(InputError, match="shared: 2 recipes have it; write shared@maker or shared@user"):
        tracking.models.by_alias("shared", None, store)


@pytest.mark.parametrize("alias", ["latest", "v3", "a b", ""])
def test_aliases_that_mlflow_refuses_are_refused_first(alias: str) -> None:
    with pytest.raises(InputError, match="give letters, digits, - and _"):
        run(parser().parse_args(["promote", "latest:sft", "--alias", alias]))


def test_a_mistyped_recipe_makes_no_registered_model(
    tracking: Tracking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(store.root))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    made = logged(tracking, store, "mine", "sft", 30)
    tracking.experiment("of another")  # has run, without this checkpoint

    def promote(recipe: str) -> int:
        return run(parser().parse_args(["promote", made.key, "--alias", "mine", "--recipe", recipe]))

    with pytest.raises(InputError, match="--recipe miine: no recipe of this name has run; there are .*mine, ") as error:
        promote("miine")
    assert "Default" not in str(error.value)  # MLflow's own experiment
    assert tracking.models.recipes_with(made) == ["mine"]
    for recipe in ("mine", "of another"):
        assert promote(recipe) == 0 and tracking.models.by_alias("mine", recipe, store) == made
    assert tracking.models.recipes_with(made) == ["mine", "of another"]


def test_what_is_no_model_cannot_be_promoted(tracking: Tracking, store: Store) -> None:
    made = publish(store, "problems")
    assert tracking.models.recipes_with(made) == []
    with pytest.raises(InputError, match="problems .* is no model that MLflow at sqlite"):
        tracking.models.set_alias_now("moving", "champion", made)


STAGES = ("base", "cold_start_sft", "alignment_rl", "evaluate")


@pytest.mark.parametrize(
    ("recipe", "gates", "champion"),
    [
        ("gates-held", ["passed", "passed"], True),
        ("one-warned", ["passed", "warned"], False),
        ("one-was-let-pass", ["approved"], False),
        ("no-gates", [], False),
    ],
)
def test_the_champion_is_what_passed_all_gates(
    tracking: Tracking, store: Store, monkeypatch: pytest.MonkeyPatch, recipe: str, gates: list[str], champion: bool
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(store.root))
    seed = 100 + sum(map(ord, recipe))
    made = {stage: logged(tracking, store, recipe, stage, seed) for stage in ("cold_start_sft", "alignment_rl")}
    keys = {stage: manifest.key for stage, manifest in made.items()}
    move_aliases(tracking, recipe, keys, STAGES, [{"status": status} for status in gates])
    assert tracking.models.by_alias("dev1", recipe, store) == made["cold_start_sft"]
    assert tracking.models.by_alias("r1", recipe, store) == made["alignment_rl"]
    if champion:
        assert tracking.models.by_alias("champion", recipe, store) == made["alignment_rl"]
    else:
        with pytest.raises(InputError, match="no registered model has this alias"):
            tracking.models.by_alias("champion", recipe, store)


@pytest.mark.parametrize(
    ("recipe", "last", "champion"), [("rounds", "alignment_rl_2", True), ("taught", "student_small", False)]
)
def test_the_champion_of_several_rounds_is_the_last_and_a_teacher_is_none(
    tracking: Tracking, store: Store, monkeypatch: pytest.MonkeyPatch, recipe: str, last: str, champion: bool
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(store.root))
    made = {stage: logged(tracking, store, recipe, stage, 70 + len(last)) for stage in ("alignment_rl", last)}
    keys = {stage: manifest.key for stage, manifest in made.items()}
    move_aliases(tracking, recipe, keys, [*STAGES, last], [{"status": "passed"}])
    if champion:
        assert tracking.models.by_alias("champion", recipe, store) == made[last]
        assert tracking.models.by_alias("r1_2", recipe, store) == made[last]
    else:
        with pytest.raises(InputError, match="no registered model has this alias"):
            tracking.models.by_alias("champion", recipe, store)


def test_a_run_without_the_last_policy_names_no_champion(
    tracking: Tracking, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(store.root))
    made = logged(tracking, store, "short", "cold_start_sft", 50)
    move_aliases(tracking, "short", {"cold_start_sft": made.key}, STAGES, [{"status": "passed"}])
    with pytest.raises(InputError, match="no registered model has this alias"):
        tracking.models.by_alias("champion", "short", store)
