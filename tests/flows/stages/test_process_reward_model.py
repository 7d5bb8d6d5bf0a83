"""The process reward model as a stage: who reads it, what its key depends on, and a whole run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import find_key, hashed_config
from flows.stage_graphs import GRAPHS
from flows.stages import process_reward_model, reasoning_rl
from grpo.config.common import Hardware
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from grpo.scoring.step_model import StepScorer
from grpo.train import read_job
from tests.support.job_runner import RL, write_job

STAGE = process_reward_model.STAGE
ON_STEPS = ("supervision=process", "step_reward=process_reward_model")


def asking(*stages: str) -> list[str]:
    return [f"{stage}.{field}" for stage in stages for field in ON_STEPS]


def graph(flow: str, *overrides: str) -> dict[str, tuple[str, ...]]:
    recipe = load_recipe("tiny", list(overrides))
    return {step.name: step.stage.needs for step in GRAPHS[flow](recipe)}


def test_a_recipe_that_does_not_ask_has_no_such_stage() -> None:
    for flow in ("r1", "distill", "r1_zero", "rlhf_ppo"):
        assert STAGE.name not in graph(flow)
    # A rule is no model.
    assert STAGE.name not in graph("r1", "reasoning_rl.supervision=process")


@pytest.mark.parametrize("flow", ["r1", "distill"])
def test_it_is_made_after_dev1_for_the_stage_that_reads_it(flow: str) -> None:
    made = graph(flow, *asking("reasoning_rl"))
    names = [*made]
    assert names.index("cold_start_sft") + 1 == names.index(STAGE.name) == names.index("reasoning_rl") - 1
    assert made["reasoning_rl"] == (*reasoning_rl.STAGE.needs, STAGE.name)
    assert [name for name, needs in made.items() if STAGE.name in needs] == ["reasoning_rl"]


def test_later_rounds_of_alignment_read_it_too() -> None:
    made = graph("r1", *asking("alignment_rl"), "alignment.rounds=2")
    assert [name for name, needs in made.items() if STAGE.name in needs] == ["alignment_rl", "alignment_rl_2"]
    assert STAGE.name not in graph("distill", *asking("alignment_rl"))  # where alignment is no part of


def test_its_own_flow_puts_it_before_reinforcement_learning() -> None:
    made = graph("process_supervision")
    assert [*made][-4:] == [STAGE.name, "reasoning_rl", "evaluate", "report"]
    assert STAGE.name in made["reasoning_rl"]


def test_the_key_of_reinforcement_learning_depends_on_the_models_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    config = load_recipe("tiny", asking("reasoning_rl")).reasoning_rl
    stage = process_reward_model.read_by(reasoning_rl.STAGE, config)
    for name in stage.needs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    inputs = {name: str(tmp_path / name) for name in stage.needs}
    first = find_key(stage, config, inputs, 0)[1]
    assert hashed_config(stage, config, 0)["step_reward"] == STAGE.name
    (tmp_path / STAGE.name / "file").write_text("another model")
    assert find_key(stage, config, inputs, 0)[1] != first


def test_the_stages_of_earlier_versions_keep_their_keys() -> None:
    assert process_reward_model.read_by(reasoning_rl.STAGE, load_recipe("tiny").reasoning_rl) is reasoning_rl.STAGE


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            asking("r1_zero"),
            "r1_zero.step_reward: 'process_reward_model' is trained from Dev1; give a rule or a folder",
        ),
        (["process_reward_model.rollouts=0"], "process_reward_model.rollouts"),
        (["process_reward_model.training.label=gold"], "process_reward_model.training.label"),
        (["reasoning_rl.supervision=process", "reasoning_rl.step_reward=proces_reward_model"], "unknown step reward"),
    ],
)
def test_bad_input_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", overrides)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_without_the_section_says_so() -> None:
    with pytest.raises(InputError, match="reasoning_rl.step_reward: add the section process_reward_model, or give a"):
        load_recipe("smollm2-135m", asking("reasoning_rl"))


def test_a_job_of_its_own_needs_the_folder(tmp_path: Path) -> None:
    settings = {**RL, "supervision": "process", "step_reward": STAGE.name}
    write_rows(tmp_path / "problems.parquet", [], Problem)
    job = write_job(tmp_path, "rl", settings=settings, model="x", problems=[tmp_path / "problems.parquet"])
    with pytest.raises(InputError, match="is a stage of recipes; give the model's folder"):
        read_job(job)


@pytest.fixture(scope="module")
def supervised(r1: Any, first_run: dict[str, Any]) -> dict[str, Any]:
    return r1.tiny("run", "--flow", "process_supervision")


@pytest.mark.slow
def test_it_is_trained_and_learnt_from_in_tiny(r1: Any, first_run: dict[str, Any], supervised: dict[str, Any]) -> None:
    status = {stage["name"]: stage["status"] for stage in supervised["stages"]}
    ran = [STAGE.name, "reasoning_rl", "evaluate", "report"]
    assert status == {name: "ran" if name in ran else "reused" for name in status}
    (out,) = r1.home.glob(f"artifacts/{STAGE.name}/*/1")
    made = next(stage for stage in supervised["stages"] if stage["name"] == STAGE.name)["metrics"]
    assert made["held_out_accuracy"] >= made["held_out_majority"] - 0.1 and 0 < made["label_soft"] < 1
    rows = pq.read_table(out / "labels").to_pylist()
    assert rows and all(len(row["right"]) == len(row["ends"]) for row in rows)
    ((scored,),) = StepScorer(str(out / "model"), Hardware(device="cpu"))(
        [(rows[0]["messages"], [rows[0]["response"]])]
    )
    assert [end for end, _ in scored] == rows[0]["ends"] and all(0 < score < 1 for _, score in scored)


@pytest.mark.slow
def test_a_second_run_reuses_it(r1: Any, supervised: dict[str, Any]) -> None:
    again = r1.tiny("run", "--flow", "process_supervision")
    assert {stage["status"] for stage in again["stages"]} == {"reused"}
    assert [stage["key"] for stage in again["stages"]] == [stage["key"] for stage in supervised["stages"]]


@pytest.mark.slow
def test_another_number_of_rollouts_makes_it_and_what_reads_it_anew(r1: Any, supervised: dict[str, Any]) -> None:
    planned = r1.tiny("plan", "--flow", "process_supervision", "--set", "process_reward_model.rollouts=5")["stages"]
    assert [stage["name"] for stage in planned if stage["status"] == "run"] == [
        STAGE.name,
        "reasoning_rl",
        "evaluate",
        "report",
    ]
