"""Keys without the settings that change no result: artifacts of earlier versions, which hashed them, are reused."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.cli import why as why_command
from flows.cli.why import NOTHING, why
from flows.home import store
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.run import executor
from flows.run import plan as plan_module
from flows.run.plan import StageSelection, plan
from flows.stage_contract import stage as contract
from flows.stage_contract.references import named_files
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage, Step, key_of
from flows.stage_graphs import GRAPHS, R1, R1_ZERO
from grpo.errors import InputError
from tasks.store.manifest import ONCE_HASHED, Manifest
from tasks.store.store import Store

STAGES = "problems base cold_start_sft sft reward_models alignment_rl r1_zero"
KEYS = {
    "tiny": "398ba0d9 6f88c8bd 730ad7a4 1b205de4 3bf753b0 ebfc430c 247e9e9c",
    "smollm2-135m": "a8ea5101 3f864d4f 750d2b40 013d18dd 234367fe 564ea656 b9d19d1d",
    "qwen3-0.6b": "601a2f14 3f864d4f 311b8d02 07e7c451 4f7794fd f90f79da d90c5a2d",
    "r1-distill-qwen-7b": "7b50da7b 3f864d4f 47dd42b6 7fb1a390 d02cef6b 9b2b1615 cd830dd3",
    "r1-paper": "ffa19d52 3f864d4f 39eddbab 733b979b 94c53bb8 ec4af59b e9c7690c",
}
"""Recipe -> the keys that the version before computed for `STAGES` without inputs, their first 8 characters. They
change only if a stage's version, its settings or a shipped recipe change: then every artifact of users is made anew."""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    # One database for all: making one takes seconds.
    database = tmp_path_factory.getbasetemp() / "keys-mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")


@pytest.fixture
def earlier() -> Iterator[pytest.MonkeyPatch]:
    """The version before, which hashed all settings. `undo` returns to this version."""
    version = pytest.MonkeyPatch()
    version.setattr(contract, "NOT_HASHED", contract.NOT_HASHED - ONCE_HASHED)
    yield version
    version.undo()


def step_of(name: str) -> Step:
    return next(step for step in (*R1, *R1_ZERO) if step.name == name)


def artifact(home: Store, step: Step, recipe: Recipe) -> Manifest:
    """An artifact of a stage's configuration, as this or the earlier version stores it."""
    config = step.config(recipe)
    with home.attempt(step.name, key_of(step.stage, config, recipe.seed, {})) as attempt:
        (attempt.out / "weights").write_text("w")
        hashed = contract.hashed_config(step.stage, config, recipe.seed)
        return attempt.publish(stage_version=step.stage.version, config=hashed)


@pytest.mark.parametrize("name", KEYS)
def test_what_shipped_recipes_made_before_is_found(name: str, tmp_path: Path, earlier: pytest.MonkeyPatch) -> None:
    recipe, home = load_recipe(name), Store(tmp_path)
    steps = [step_of(stage) for stage in STAGES.split()]
    made = [artifact(home, step, recipe) for step in steps]
    assert " ".join(manifest.key[:8] for manifest in made) == KEYS[name]
    earlier.undo()
    for step, manifest in zip(steps, made, strict=True):
        key = key_of(step.stage, step.config(recipe), recipe.seed, {})
        assert home.find(key, stage=step.name) == manifest
        # Only where the setting exists: the keys of all other stages are what they were.
        assert (key == manifest.key) == ("save_every" not in str(manifest.config))
        hashed = str(contract.hashed_config(step.stage, step.config(recipe), recipe.seed))
        assert not any(setting in hashed for setting in ONCE_HASHED)


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("cold_start_sft", "cold_start_sft.save_every=7"),
        ("reasoning_rl", "reasoning_rl.save_every=7"),
        ("reasoning_rl", "reasoning_rl.samples_every=7"),
        ("base", "base.pretrain.save_every=7"),
        ("reward_models", "reward_models.helpful.save_every=7"),
    ],
)
def test_how_often_it_saves_is_no_part_of_the_key(stage: str, change: str) -> None:
    step = step_of(stage)
    configs = [step.config(load_recipe("tiny", overrides)) for overrides in ([], [change])]
    assert configs[0] != configs[1]
    assert key_of(step.stage, configs[0], 0, {}) == key_of(step.stage, configs[1], 0, {})


def test_of_another_trainer_its_version_and_options_count_and_its_place_does_not() -> None:
    def key(**trainer: Any) -> str:
        fields = {"kind": "verl", "python": "/opt/verl/bin/python", **trainer}
        table = ",".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
        step = step_of("sft")
        return key_of(step.stage, step.config(load_recipe("tiny", [f"sft.hardware.trainer={{{table}}}"])), 0, {})

    assert key() == key(python="/elsewhere/python")
    step = step_of("sft")
    ours = key_of(step.stage, step.config(load_recipe("tiny")), 0, {})
    assert len({ours, key(), key(version="0.9.2"), key(options=["engine.param_offload=True"])}) == 4


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (
            "reasoning_rl",
            ["source_weights={python=0.9,a=1}", "source_weights={python=0.1,a=1}", "source_weights={a=1}"],
        ),
        ("sft_data", [f"sampling_by_source={{python={{temperature={t},max_new_tokens=9}}}}" for t in (0.2, 1.2)]),
    ],
)
def test_names_that_a_user_chose_are_part_of_the_key(stage: str, changes: list[str]) -> None:
    """A source may be called `python`, though settings of that name are not hashed."""
    step = step_of(stage)
    configs = [step.config(load_recipe("tiny", [f"{stage}.{change}"])) for change in changes]
    assert len({key_of(step.stage, config, 0, {}) for config in configs}) == len(changes)


class Config(BaseModel):
    text: str = "hello"
    save_every: int = 20


BUILT: list[str] = []


@pytest.mark.parametrize(
    ("stage", "field"), [("evaluate", "evaluate"), ("sft_data", "sft_data"), ("reward_models_2", "reward_models")]
)
def test_a_judge_counts_by_what_its_folder_holds(stage: str, field: str, tmp_path: Path) -> None:
    def key(folder: Path, text: str) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(text)
        judge = f'{field}.judge={{kind = "local", path = "{folder}"}}'
        recipe = load_recipe("tiny", [judge, "alignment.rounds=2"])
        (step,) = [step for step in GRAPHS["r1"](recipe) if step.name == stage]
        config = step.config(recipe)
        files = named_files(step.stage.files(config), config)
        return key_of(step.stage, config, 0, {name: item.ref for name, item in files.items()})

    first = key(tmp_path / "a", "weights")
    assert key(tmp_path / "b", "weights") == first
    assert key(tmp_path / "a", "others") != first


def build(context: Context) -> Outcome:
    BUILT.append(context.stage.name)
    (context.out / "text").write_text(context.config.text)
    return Outcome()


FIRST, SECOND = Stage("first", 1, (), build), Stage("second", 1, ("first",), build)


def run(stage: Stage, force: bool = False, inputs: dict[str, str] | None = None, **config: Any) -> dict[str, Any]:
    data: dict[str, Any] = run_stage(stage, Config(**config), inputs or {}, 0, RunContext(force=force))
    return data


def test_a_stage_under_an_earlier_versions_key_is_reused(earlier: pytest.MonkeyPatch) -> None:
    BUILT.clear()
    first, second = run(FIRST, save_every=10), run(SECOND, save_every=30)
    earlier.undo()
    for every in (10, 11):
        again = run(FIRST, save_every=every)
        assert (again["status"], again["key"]) == ("reused", first["key"])
        after = run(SECOND, save_every=every, inputs={"first": again["key"]})
        assert (after["status"], after["key"]) == ("reused", second["key"])
    assert BUILT == ["first", "second"]
    assert run(FIRST, text="other")["status"] == "ran"
    forced = run(FIRST, force=True, save_every=10)
    assert forced["status"] == "ran" and forced["key"] != first["key"]
    assert run(FIRST, save_every=10)["digest"] == forced["digest"], "the newest, as with any forced stage"
    assert store().find(forced["key"]).config == {"text": "hello", "seed": 0}  # type: ignore[union-attr]


def test_a_damaged_artifact_of_an_earlier_version_is_not_reused(earlier: pytest.MonkeyPatch) -> None:
    made = store().resolve(run(FIRST)["key"])
    earlier.undo()
    (made.path / "text").write_text("longer than before")
    assert run(FIRST)["status"] == "ran"


def test_the_plan_reuses_it_and_names_other_causes_only(
    earlier: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Step(stage, section=lambda recipe: Config(save_every=recipe.seed)) for stage in (FIRST, SECOND)]
    monkeypatch.setattr(plan_module, "check_gates", lambda *_: [])
    recipe = load_recipe("tiny", seed=0)
    made = [run(FIRST, save_every=10), run(SECOND, save_every=10)]
    earlier.undo()
    planned = plan(steps, recipe, StageSelection())
    assert [(stage.status, stage.key) for stage in planned] == [("reuse", m["key"]) for m in made]
    other = [Step(FIRST, section=lambda recipe: Config(text="other", save_every=11))]
    (planned_other,) = plan(other, recipe, StageSelection())
    assert (planned_other.status, planned_other.why) == ("run", "text: hello -> other")


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """A graph of two stages, which recipes run without Prefect."""
    for module in (plan_module, executor):
        monkeypatch.setattr(module, "check_gates", lambda *_: [])
    monkeypatch.setattr(executor, "for_record", lambda *_: None)
    monkeypatch.setattr(executor, "run_here", lambda step, *arguments: run_stage(step.stage, *arguments))
    return [Step(stage, section=lambda recipe: Config()) for stage in (FIRST, SECOND)]


def ran(steps: list[Step], selection: StageSelection) -> list[tuple[str, str]]:
    """The status and key of each stage that a run with these arguments ran."""
    result = executor._run("toy", steps, load_recipe("tiny", seed=0), [], selection, False)
    return [(stage["status"], stage["key"]) for stage in result["stages"]]


@pytest.mark.parametrize("selection", [StageSelection(only="second"), StageSelection(start="second")])
def test_the_plan_refuses_a_missing_input_with_the_line_of_the_run(toys: list[Step], selection: StageSelection) -> None:
    with pytest.raises(InputError, match="^latest:first: no artifact of stage 'first'") as planned:
        plan(toys, load_recipe("tiny", seed=0), selection)
    with pytest.raises(executor.RecipeFailed) as failed:
        ran(toys, selection)
    assert str(failed.value) == f"second: {planned.value}"


def test_the_plan_knows_the_key_of_a_stage_that_reads_the_newest(toys: list[Step]) -> None:
    recipe, only = load_recipe("tiny", seed=0), StageSelection(only="second")
    run(FIRST, text="of another recipe")
    note = "; input first: the newest artifact of its stage"
    for status, begins in (("run", "never made"), ("reuse", "made 20")):
        skipped, planned = plan(toys, recipe, only)
        assert (skipped.status, planned.status) == ("skip", status)
        assert planned.why.startswith(begins) and planned.why.endswith(note)
        assert ran(toys, only) == [({"run": "ran", "reuse": "reused"}[status], planned.key)]
    # A stage that is made before it in the same run is read instead, and its artifact does not exist yet.
    first, second = plan(toys, recipe, StageSelection())
    assert first.status == "run" and (second.status, second.why, second.key) == (
        "run",
        "input first is made anew",
        None,
    )


def test_a_given_stage_is_not_made_and_keeps_its_alias(toys: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(FIRST, text="given")
    moved: list[str] = []
    monkeypatch.setattr(executor, "move_aliases", lambda _, __, produced, *___: moved.extend(produced))
    BUILT.clear()
    selection = StageSelection(inputs={"first": given["key"]})
    skipped, planned = plan(toys, load_recipe("tiny", seed=0), selection)
    assert (skipped.status, skipped.why, planned.status) == ("skip", f"given: {given['key']}", "run")
    assert ran(toys, selection) == [("ran", planned.key)]
    assert BUILT == moved == ["second"]
    assert store().resolve(planned.key or "").inputs["first"].digest == given["digest"]


def test_all_stages_read_the_same_given_artifact(toys: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    given = run(FIRST, text="given")

    def overtaken(step: Step, *arguments: Any) -> dict[str, Any]:
        made = run_stage(step.stage, *arguments)
        run(FIRST, text=f"newer than {step.name}")
        return made

    monkeypatch.setattr(executor, "run_here", overtaken)
    third = Step(Stage("third", 1, ("first", "second"), build), section=lambda recipe: Config())
    made = ran([*toys, third], StageSelection(inputs={"first": "latest"}))
    assert {store().resolve(key).inputs["first"].digest for _, key in made} == {given["digest"]} and len(made) == 2


def test_why_names_other_causes_only(earlier: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old = store().resolve(run(FIRST, save_every=10)["key"])
    read = store().resolve(run(SECOND)["key"])
    rarer = store().resolve(run(FIRST, save_every=30)["key"])
    earlier.undo()
    new = store().resolve(run(FIRST, force=True)["key"])
    other = store().resolve(run(FIRST, text="other")["key"])
    known = {manifest.digest: manifest for manifest in store().list()}
    assert len({old.key, rarer.key, new.key}) == 3
    assert why(old, rarer, known) == why(old, new, known) == []
    assert [reason["said"] for reason in why(old, other, known)] == ["text: hello -> other"]
    later = store().resolve(run(SECOND, force=True, inputs={"first": new.key})["key"])
    assert [reason["said"] for reason in why(read, later, known)] == [f"input first changed: {NOTHING}"]

    assert why_command.run(Namespace(old=old.key, new=new.key, json=False)) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"  {NOTHING}"]
