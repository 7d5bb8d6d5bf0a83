"""The stage contract on a stage that only writes a file: no server, no trainer, the real store and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.home import store
from flows.recipe.load import load_recipe
from flows.stages.contract import Context, Outcome, RunContext, Stage, hashed_config, key_of
from flows.stages.references import external, resolve
from flows.stages.runner import run_stage
from grpo.errors import InputError
from tasks.store.diff import changed_fields


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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    BUILT.clear()
    return tmp_path / "home"


def run(stage: Stage, seed: int = 0, inputs: dict[str, str] | None = None, force: bool = False, **config: Any) -> Any:
    state = run_stage(stage, Config(**config), inputs or {}, seed, RunContext(force=force))
    return {**state.data, "state": state.name}


def test_what_exists_is_reused() -> None:
    made, again = run(FIRST), run(FIRST)
    assert (made["status"], made["state"]) == ("ran", "Completed")
    assert (again["status"], again["state"]) == ("reused", "Reused")
    assert made["digest"] == again["digest"] and BUILT == ["hello"]
    assert made["counts"] == {"letters": 5} and made["metrics"] == {"share": 0.5}


def test_config_seed_and_input_make_the_key() -> None:
    keys = {run(FIRST)["key"], run(FIRST, seed=1)["key"], run(FIRST, text="other")["key"]}
    assert len(keys) == 3
    after = [run(SECOND, inputs={"first": key})["key"] for key in sorted(keys)]
    assert len(set(after)) == 3


def test_an_input_not_given_is_the_newest() -> None:
    run(FIRST, text="old")
    newest = run(FIRST, text="new")
    assert run(SECOND)["key"] == run(SECOND, inputs={"first": newest["digest"][:12]})["key"]


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
