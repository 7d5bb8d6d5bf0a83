"""Distillation, InstructGPT's steps and two rounds of alignment, for real, beside an R1 run whose stages they share.

The flows take most of a minute each; what they made is looked at by several tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.recipe.load import load_recipe
from flows.stage_graphs import GRAPHS
from grpo.data.records import read_samples
from grpo.errors import InputError

TO_SFT_DATA = ["problems", "base", "cold_start_data", "cold_start_sft", "reasoning_rl", "sft_data"]
STUDENTS = ["base_small", "student_small", "base_smallest", "student_smallest"]


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in result["stages"]}


def keys(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["key"] for stage in result["stages"]}


def folder(r1: Any, result: dict[str, Any], stage: str) -> Path:
    return next(r1.home.glob(f"artifacts/{stage}/{keys(result)[stage]}/1"))


def manifest(r1: Any, result: dict[str, Any], stage: str) -> dict[str, Any]:
    return json.loads((folder(r1, result, stage) / "manifest.json").read_text())


@pytest.fixture(scope="module")
def distilled(r1: Any, first_run: dict[str, Any]) -> dict[str, Any]:
    return r1.tiny("run", "--flow", "distill")


@pytest.fixture(scope="module")
def rlhf(r1: Any, first_run: dict[str, Any]) -> dict[str, Any]:
    return r1.tiny("run", "--flow", "rlhf_ppo")


@pytest.mark.slow
def test_distillation_takes_the_sft_data_from_the_r1_run(first_run: dict[str, Any], distilled: dict[str, Any]) -> None:
    ran = [*STUDENTS, "evaluate", "report"]
    assert statuses(distilled) == dict.fromkeys(TO_SFT_DATA, "reused") | dict.fromkeys(ran, "ran")
    assert all(keys(distilled)[name] == keys(first_run)[name] for name in TO_SFT_DATA)


@pytest.mark.slow
def test_students_of_two_sizes_and_vocabularies_stand_beside_their_teacher(r1: Any, distilled: dict[str, Any]) -> None:
    assert list(distilled["checkpoints"]) == ["dev2", "small", "smallest"]
    shapes = {}
    for name in ("small", "smallest"):
        config = json.loads((folder(r1, distilled, f"student_{name}") / "config.json").read_text())
        shapes[name] = (config["hidden_size"], config["num_hidden_layers"])
    assert shapes == {"small": (40, 3), "smallest": (24, 2)}
    tokenizers = {manifest(r1, distilled, s)["tokenizer_sha256"] for s in ("reasoning_rl", "student_smallest")}
    assert len(tokenizers) == 2


@pytest.mark.slow
def test_a_student_learns_its_teachers_format(distilled: dict[str, Any]) -> None:
    # Their base models hardly ever saw a tag: whoever closes both pairs has learnt it from the data.
    assert distilled["checkpoints"]["small"]["format"] > 0.5


@pytest.mark.slow
def test_another_sft_setting_reruns_one_student_and_not_its_pretraining(r1: Any, distilled: dict[str, Any]) -> None:
    planned = r1.tiny("plan", "--flow", "distill", "--set", "distill.students.1.sft.epochs=3")["stages"]
    assert [stage["name"] for stage in planned if stage["status"] == "run"] == [
        "student_smallest",
        "evaluate",
        "report",
    ]
    assert next(stage["why"] for stage in planned if stage["name"] == "student_smallest") == "epochs: 2 -> 3"


@pytest.mark.slow
def test_the_report_and_the_chat_know_the_students(r1: Any, distilled: dict[str, Any]) -> None:
    report = Path(distilled["report"]).read_text()
    assert '<th scope="col" class="num">small</th>' in report and "<h4>smallest" in report
    said = r1("chat", "student_small", stdin="compute 3 + 4\n")
    assert said.returncode == 0 and said.stdout.strip()


@pytest.mark.slow
def test_rlhf_shares_the_sft_model_and_trains_its_own_reward_models(
    r1: Any, first_run: dict[str, Any], rlhf: dict[str, Any]
) -> None:
    ran = ["reward_models", "rlhf_ppo", "evaluate", "report"]
    assert statuses(rlhf) == dict.fromkeys(TO_SFT_DATA[:4], "reused") | dict.fromkeys(ran, "ran")
    dev1 = keys(first_run)["cold_start_sft"]
    assert manifest(r1, rlhf, "reward_models")["inputs"]["sft"]["key"] == dev1
    assert manifest(r1, first_run, "reward_models")["inputs"]["sft"]["key"] == keys(first_run)["sft"]
    ppo = manifest(r1, rlhf, "rlhf_ppo")
    assert ppo["inputs"]["cold_start_sft"]["key"] == dev1
    assert ppo["inputs"]["reward_models"]["key"] == keys(rlhf)["reward_models"]
    assert (ppo["config"]["method"], ppo["steps_completed"]) == ("ppo", 4)


@pytest.mark.slow
def test_ppo_is_measured_against_its_sft_model(r1: Any, rlhf: dict[str, Any]) -> None:
    assert list(rlhf["checkpoints"]) == ["base", "dev1", "ppo"]
    assert rlhf["checkpoints"]["dev1"]["win_rate_dev1"] == 0.5
    assert 0 <= rlhf["checkpoints"]["ppo"]["win_rate_dev1"] <= 1
    assert "win rate over dev1" in Path(rlhf["report"]).read_text()
    assert {s.domain for s in read_samples(folder(r1, rlhf, "evaluate") / "samples" / "ppo")} == {
        "reasoning",
        "general",
    }


@pytest.mark.slow
def test_ppo_learns_from_general_prompts_only(rlhf: dict[str, Any]) -> None:
    metrics = next(stage["metrics"] for stage in rlhf["stages"] if stage["name"] == "rlhf_ppo")
    assert {"reward_helpful", "reward_safe", "kl"} <= metrics.keys() and "reward_accuracy" not in metrics


@pytest.fixture(scope="module")
def rounds(r1: Any, first_run: dict[str, Any]) -> dict[str, Any]:
    return r1.tiny("run", "--set", "alignment.rounds=2", "--set", "alignment.replay_share=0.25")


@pytest.mark.slow
def test_a_second_round_goes_on_from_the_first(r1: Any, first_run: dict[str, Any], rounds: dict[str, Any]) -> None:
    before = keys(first_run)
    ran = ["reward_models_2", "alignment_rl_2", "evaluate", "report"]
    reused = [name for name in before if name not in ran]
    assert statuses(rounds) == dict.fromkeys(reused, "reused") | dict.fromkeys(ran, "ran")
    assert all(keys(rounds)[name] == before[name] for name in reused)
    models = manifest(r1, rounds, "reward_models_2")
    assert {name: ref["key"] for name, ref in models["inputs"].items()} == {
        name: before[name] for name in ("problems", "alignment_rl", "reward_models")
    }
    policy = manifest(r1, rounds, "alignment_rl_2")
    assert policy["inputs"]["alignment_rl"]["key"] == before["alignment_rl"]
    assert policy["inputs"]["reward_models_2"]["key"] == keys(rounds)["reward_models_2"]
    assert manifest(r1, rounds, "evaluate")["inputs"]["reward_models"]["key"] == keys(rounds)["reward_models_2"]
    assert list(rounds["checkpoints"]) == ["base", "dev1", "dev2", "dev3", "r1", "r1_2"]


@pytest.mark.slow
def test_a_quarter_of_what_the_second_reward_models_learn_from_is_the_firsts(r1: Any, rounds: dict[str, Any]) -> None:
    counts = manifest(r1, rounds, "reward_models_2")["counts"]
    for name in ("helpful", "safe"):
        own, first = (
            pq.read_table(folder(r1, rounds, stage) / "data" / f"{name}.parquet").to_pylist()
            for stage in ("reward_models_2", "reward_models")
        )
        new = sum(not row["held_out"] for row in own)
        assert own != first and counts[f"{name}_replayed"] == round(new / 3) > 0  # a third as many: a quarter of all


@pytest.mark.slow
def test_the_plan_the_report_and_the_chat_know_the_rounds(r1: Any, rounds: dict[str, Any]) -> None:
    def planned(share: float) -> list[str]:
        sets = ("--set", "alignment.rounds=2", "--set", f"alignment.replay_share={share}")
        return [stage["name"] for stage in r1.tiny("plan", *sets)["stages"] if stage["status"] == "run"]

    assert planned(0.25) == []
    assert planned(0.5) == ["reward_models_2", "alignment_rl_2", "evaluate", "report"]
    report = Path(rounds["report"]).read_text()
    assert '<th scope="col" class="num">r1_2</th>' in report and "alignment_rl_2" in report
    said = r1("chat", "r1_2", stdin="compute 3 + 4\n")
    assert said.returncode == 0 and said.stdout.strip()


def test_a_recipe_without_the_section_says_which_is_missing() -> None:
    paper = load_recipe("smollm2-135m")
    with pytest.raises(InputError, match="has no section distill; add it to run this flow"):
        GRAPHS["distill"](paper)
