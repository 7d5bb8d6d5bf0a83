"""The stage contract on a stage that only writes a file: no server, no trainer, the real store and MLflow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.home import store, tracking
from flows.recipe.load import load_recipe
from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.references import external, resolve
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage, hashed_config, key_of
from flows.stage_contract.stage_flow import completed
from grpo.errors import InputError
from tasks.estimate.origin import origin
from tasks.store.diff import changed_fields
from tasks.store.manifest import MANIFEST
from tasks.tracking.audit import digests_in_use
from tasks.tracking.connection import default_uri
from tasks.tracking.lineage import artifact_of
from tasks.tracking.recipe_run import load_run
from tasks.tracking.tags import DIGEST_TAG, MADE_BY_TAG, NOTE_TAG, STAGE_TAG, STATUS_TAG


class Config(BaseModel):
    text: str = "hello"
    path: str | None = None


BUILT: list[str] = []


def build(context: Context) -> Outcome:
    BUILT.append(context.config.text)
    if context.config.text == "fail":
        (context.out / "half").write_text("half")
        raise RuntimeError("on purpose")
    (context.out / "text").write_text(context.config.text)
    return Outcome(counts={"letters": len(context.config.text)}, metrics={"share": 0.5})


FIRST = Stage("first", 1, (), build, files=lambda config: {"file": config.path} if config.path else {})
SECOND = Stage("second", 1, ("first",), build)
MODEL = Stage("model", 1, ("first",), lambda context: replace(build(context), model="dev1", steps_completed=3))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    BUILT.clear()
    return tmp_path / "home"


def run(stage: Stage, seed: int = 0, inputs: dict[str, str] | None = None, force: bool = False, **config: Any) -> Any:
    summary = run_stage(stage, Config(**config), inputs or {}, seed, RunContext(force=force))
    return {**summary, "state": completed(summary).name}


def test_what_exists_is_reused() -> None:
    made, again = run(FIRST), run(FIRST)
    assert (made["status"], made["state"]) == ("ran", "Completed")
    assert (again["status"], again["state"]) == ("reused", "Reused")
    assert made["digest"] == again["digest"] and BUILT == ["hello"]
    assert made["counts"] == {"letters": 5} and made["metrics"] == {"share": 0.5}


def test_an_artifact_and_its_run_say_where_they_come_from() -> None:
    made = store().find(run(FIRST)["key"])
    assert made is not None and made.origin == origin()
    tags = tracking().client.get_run(made.mlflow_run_id).data.tags
    assert tags["mlflow.user"] == made.origin["user"] and tags["r1flow.origin.machine"] == made.origin["machine"]
    shown = {name: tags.get(f"r1flow.origin.{name}") for name in ("version", "dirty", "torch", "transformers")}
    assert shown == {name: made.origin.get(name) for name in shown} and shown["torch"] and shown["version"]
    assert tags.get("mlflow.source.git.commit") == made.origin.get("commit")


def test_the_recipes_run_shows_data_sets_and_models_of_its_stages() -> None:
    parent = tracking().recipe_run("toy", "toy seed 0", {}, {})
    where = RunContext(recipe="toy", parent_run_id=parent)
    made = [run_stage(stage, Config(), {}, 0, where)["digest"] for stage in (FIRST, MODEL)]
    found = tracking().client.get_run(parent)
    (data,) = found.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("first", made[0][:36])
    (model,) = found.outputs.model_outputs
    assert (model.model_id, model.step) == (tracking().models.find(made[1]), 3)


def test_a_reused_stage_is_a_link_on_the_recipes_run(home: Path) -> None:
    first = run(FIRST)
    maker = store().resolve(first["key"]).mlflow_run_id
    record = tracking()
    parent = record.recipe_run("toy", "toy seed 0", {}, {NOTE_TAG: "a recipe"})
    where = RunContext(recipe="toy", parent_run_id=parent)
    for _ in range(2):  # a recipe run that continues reuses it once more
        assert run_stage(FIRST, Config(), {}, 0, where)["status"] == "reused"
    run_stage(SECOND, Config(), {}, 0, where)
    run_stage(SECOND, Config(), {}, 0, where)  # what the run itself made is not reused
    assert [child.tags["r1flow.stage"] for child in record.reader.stage_runs(parent)] == ["second"]
    note = record.client.get_run(parent).data.tags[NOTE_TAG]
    experiment = record.client.get_run(maker).info.experiment_id
    assert note.splitlines() == [
        "a recipe", "", "**Reused stages**", "",
        f"- [first](#/experiments/{experiment}/runs/{maker}) made by `first seed 0`",
    ]  # fmt: skip
    found = record.reader.run(parent)
    assert found is not None
    loaded = load_run(record.reader, store(), found)
    assert [(stage.name, stage.status) for stage in loaded.stages] == [("first", "reused"), ("second", "ran")]
    assert loaded.stages[0].maker.id == maker and set(loaded.manifests) == {"first", "second"}
    assert artifact_of(parent, "first", record, store()).digest == first["digest"]
    assert first["digest"] in digests_in_use(record)
    (data, *_) = record.client.get_run(parent).inputs.dataset_inputs
    assert data.dataset.name == "first"


def test_a_reused_stage_whose_run_is_gone_has_no_link(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(FIRST)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(home / "another"))
    parent = tracking().recipe_run("toy", "toy seed 0", {}, {})
    made = run_stage(FIRST, Config(), {}, 0, RunContext(recipe="toy", parent_run_id=parent))
    note = tracking().client.get_run(parent).data.tags[NOTE_TAG]
    assert note == f"**Reused stages**\n\n- first, artifact {made['key'][:12]}"


def test_reused_stages_of_earlier_versions_are_runs_of_their_own() -> None:
    made = store().resolve(run(FIRST)["key"])
    record = tracking()
    parent = record.recipe_run("toy", "train_r1 seed 0", {}, {})
    tags = {STATUS_TAG: "reused", STAGE_TAG: "first", DIGEST_TAG: made.digest, MADE_BY_TAG: made.mlflow_run_id or ""}
    record.finish(record.stage_run(parent, "toy", "first seed 0", {}, tags), "FINISHED")
    found = record.reader.run(parent)
    assert found is not None
    (stage,) = load_run(record.reader, store(), found).stages
    assert (stage.status, stage.maker.id, stage.manifest) == ("reused", made.mlflow_run_id, made)


def test_an_artifact_of_an_earlier_version_has_no_origin_and_is_reused() -> None:
    made = store().find(run(FIRST)["key"])
    assert made is not None
    values = json.loads((made.path / MANIFEST).read_text())
    del values["origin"], values["checksum"]
    (made.path / MANIFEST).write_text(json.dumps(values))
    found = store().find(made.key)
    assert found is not None and found.origin is None and found.digest == made.digest
    assert run(FIRST)["status"] == "reused"


def test_config_seed_and_input_make_the_key() -> None:
    keys = {run(FIRST)["key"], run(FIRST, seed=1)["key"], run(FIRST, text="other")["key"]}
    assert len(keys) == 3
    after = [run(SECOND, inputs={"first": key})["key"] for key in sorted(keys)]
    assert len(set(after)) == 3


def test_an_input_not_given_is_the_newest() -> None:
    run(FIRST, text="old")
    newest = run(FIRST, text="new")
    assert run(SECOND)["key"] == run(SECOND, inputs={"first": newest["digest"][:12]})["key"]


def test_a_damaged_input_is_not_read() -> None:
    made = run(FIRST)
    text = store().resolve(made["key"]).path / "text"
    text.write_text("jello")  # as long as before
    for inputs in ({}, {"first": made["key"]}):
        with pytest.raises(InputError, match="damaged: the contents of text changed after it was made"):
            run(SECOND, inputs=inputs)
    assert BUILT == ["hello"]


def test_force_is_a_new_attempt_not_a_reentry() -> None:
    made, forced = run(FIRST), run(FIRST, force=True)
    assert BUILT == ["hello", "hello"] and forced["status"] == "ran"
    assert made["key"] == forced["key"]
    found = store().find(made["key"])
    assert found is not None and found.attempt == 2


def test_a_failure_publishes_nothing(home: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        run(FIRST, text="fail")
    assert store().list() == [] and not list(home.glob("artifacts/*/*/*"))


def test_the_curve_of_a_finished_job_goes_to_the_run_of_the_attempt_that_publishes_it() -> None:
    """As after a kill between the end of a job and the publication of its stage."""

    def trained(context: Context) -> Outcome:
        work = context.attempt.work / "trainer"
        work.mkdir(parents=True)
        (work / "metrics.jsonl").write_text('{"step": 1, "of": 2, "loss": 3.0}\n{"step": 2, "of": 2, "loss": 2.5}\n')
        (work / "done.json").write_text('{"steps_completed": 2}')
        assert context.run_job("rl") == {"steps_completed": 2}
        return build(context)

    run(replace(FIRST, build=trained))
    record = tracking()
    (made,) = store().list()
    assert made.mlflow_run_id is not None
    assert dict(record.reader.curve(made.mlflow_run_id, "loss")) == {1: 3.0, 2: 2.5}


@pytest.mark.parametrize(
    ("kept", "counts", "metrics"),
    [
        ({"step": 4, "metric": "loss", "value": 0.5}, {"kept_step": 4}, {"kept/loss": 0.5}),
        ({"step": 0, "metric": "loss", "value": None}, {}, {}),  # of an earlier version: no loss was finite
        (None, {}, {}),  # the job did not validate
    ],
)
def test_the_chosen_step_is_among_the_numbers_of_a_checkpoint(kept: Any, counts: Any, metrics: Any) -> None:
    result = {"counts": {"sequences": 7}, "metrics": {"loss": 2.0}, "steps_completed": 6, "kept": kept}
    outcome = checkpoint_outcome(result, "dev1")
    assert (outcome.counts, outcome.metrics) == ({"sequences": 7, **counts}, {"loss": 2.0, **metrics})


def test_unknown_inputs_are_named() -> None:
    with pytest.raises(InputError, match="stage 'second' has no input 'third'; its inputs: first"):
        run(SECOND, inputs={"third": "latest:first"})
    with pytest.raises(InputError, match="no artifact of stage 'first'"):
        run(SECOND)
    with pytest.raises(InputError, match="no such file or folder"):
        resolve("/nothing/here")


def test_a_file_counts_by_its_contents_not_by_its_place(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("same")
    b.write_text("same")
    assert run(FIRST, path=str(a))["key"] == run(FIRST, path=str(b))["key"]
    b.write_text("changed")
    assert run(FIRST, path=str(a))["key"] != run(FIRST, path=str(b))["key"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x").write_text("1")
    before = external(str(folder)).ref.digest
    (folder / "x").write_text("2")
    assert external(str(folder)).ref.digest != before


def test_the_device_is_no_part_of_the_key() -> None:
    from flows.stages.reasoning_rl import STAGE

    configs = [load_recipe("tiny", [f"reasoning_rl.hardware.device={d}"]).reasoning_rl for d in ("cpu", "cuda")]
    assert configs[0] != configs[1]
    assert key_of(STAGE, configs[0], 0, {}) == key_of(STAGE, configs[1], 0, {})
    assert "device" not in str(hashed_config(STAGE, configs[0], 0))


def test_differences_of_configurations() -> None:
    old = {"a": 1, "b": {"c": [1, 2]}, "gone": 0}
    new = {"a": 1, "b": {"c": [1, 3]}, "come": 5}
    assert changed_fields(old, new) == [("b.c.1", 2, 3), ("come", None, 5), ("gone", 0, None)]
