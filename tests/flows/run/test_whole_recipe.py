"""The whole recipe for real, in a smaller miniature: Prefect, MLflow, trainers, the store."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from flows.recipe.schema import Recipe
from flows.stage_graphs import R1 as GRAPH
from flows.stages.problems import HELD_OUT, TRAIN
from grpo.data.records import read_problems
from tasks.problems.miniature.everyday import held_out_seen
from tasks.problems.normal_form import normalise
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.reuse import reuses
from tasks.tracking.tags import STAGE_TAG
from tests.support.r1 import SMALLER

pytestmark = pytest.mark.system

NAMES = [step.name for step in GRAPH]


def statuses(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in result["stages"]}


def test_the_first_run_runs_everything(first_run: dict[str, Any]) -> None:
    assert statuses(first_run) == dict.fromkeys(NAMES, "ran")
    assert list(first_run["checkpoints"]) == ["base", "dev1", "dev2", "dev3", "r1"]
    for row in first_run["checkpoints"].values():
        for metric in ("pass@1", "pass@k", "cons@k"):
            low, high = row[f"{metric}_ci95"]
            assert 0 <= low <= row[metric] <= high <= 1
        assert row["pass@1"] <= row["pass@k"] and row["k"] == 4
        assert {"format", "language", "mean_tokens"} <= row.keys()


def test_the_log_of_every_trainer_is_an_artifact_of_its_stages_run(r1: Any, first_run: dict[str, Any]) -> None:
    logs = list(r1.home.glob("mlartifacts/*/*/artifacts/logs/*/trainer.log"))
    jobs = [path.parent.name for path in logs]
    assert jobs.count("trainer") >= 5 and {"helpful", "safe"} <= set(jobs)


def test_mlflow_has_the_closing_table_at_its_models_and_loads_them(r1: Any, first_run: dict[str, Any]) -> None:
    import mlflow

    mlflow.set_tracking_uri(default_uri(r1.home))
    run = mlflow.get_run(first_run["run_id"])
    table = first_run["checkpoints"]
    assert {f"pass_at_1/{name}": row["pass@1"] for name, row in table.items()}.items() <= run.data.metrics.items()
    stages = Tracking(default_uri(r1.home)).reader.stage_runs(first_run["run_id"])
    (evaluation,) = [stage.id for stage in stages if stage.tags[STAGE_TAG] == "evaluate"]
    ranked = mlflow.search_logged_models(
        [run.info.experiment_id],
        output_format="list",
        order_by=[{"field_name": "metrics.pass_at_1", "ascending": False}],
    )
    # Other tests may have evaluated the same models, with other settings.
    values = [
        metric.value
        for model in ranked
        for metric in model.metrics
        if (metric.key, metric.dataset_name, metric.run_id) == ("pass_at_1", "problems", evaluation)
    ]
    assert sorted(values) == sorted(row["pass@1"] for row in table.values())
    pipeline = mlflow.transformers.load_model("models:/tiny@dev1")
    (found,) = pipeline([{"role": "user", "content": "compute 3 + 4"}], max_new_tokens=80)
    assert "<answer>" in found["generated_text"][-1]["content"]


def test_completions_of_rl_are_a_table_with_rewards_by_name(r1: Any, first_run: dict[str, Any]) -> None:
    record = Tracking(default_uri(r1.home))
    (rl,) = [run for run in record.reader.stage_runs(first_run["run_id"]) if run.tags[STAGE_TAG] == "reasoning_rl"]
    assert json.loads(rl.tags["mlflow.loggedArtifacts"])[0] == {"path": "completions.json", "type": "table"}
    table = pd.DataFrame(**record.reader.read_json(rl.id, "completions.json"))
    rewards = {"reward", "reward_accuracy", "reward_format", "reward_language"}
    assert {"step", "prompt", "gold", "completion", "advantage"} | rewards <= set(table.columns)
    assert table["step"].iloc[0] == 0 and table["completion"].str.len().gt(0).any()


def test_the_cold_start_teaches_the_format(first_run: dict[str, Any]) -> None:
    table = first_run["checkpoints"]
    assert table["base"]["format"] < 0.2 < 0.9 < table["dev1"]["format"]


def test_again_reuses_everything_as_planned(
    r1: Any, first_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = r1.tiny("plan")
    assert {stage["name"]: stage["status"] for stage in plan["stages"]} == dict.fromkeys(NAMES, "reuse")
    policy = next(stage["key"] for stage in first_run["stages"] if stage["name"] == "cold_start_sft")
    given = r1.tiny("plan", "--input", f"cold_start_sft={policy}")["stages"]
    assert [stage for stage in given if stage["status"] != "skip"] == [
        stage for stage in plan["stages"] if stage["name"] != "cold_start_sft"
    ]
    log = r1.home / "logs/prefect-run.log"
    log.unlink()
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    sets = [part for value in SMALLER for part in ("--set", value)]
    done = r1("run", "tiny", *sets, "--json")
    monkeypatch.delenv("PYTHONPROFILEIMPORTTIME")
    again = json.loads(done.stdout.splitlines()[-1])
    assert not log.exists()  # no Prefect server was started: nothing had to be made
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "mlflow" in imported and "prefect" not in imported
    assert statuses(again) == dict.fromkeys(NAMES, "reused")
    assert [s["key"] for s in again["stages"]] == [s["key"] for s in first_run["stages"]]
    assert again["checkpoints"] == first_run["checkpoints"]
    reader = Tracking(default_uri(r1.home)).reader
    assert reader.stage_runs(again["run_id"]) == [] and len(reader.stage_runs(first_run["run_id"])) == len(NAMES)
    found = reader.run(again["run_id"])
    assert found is not None and {reuse.stage for reuse in reuses(found.tags)} == set(NAMES)


def test_one_field_reruns_its_stage_and_what_depends_on_it(r1: Any, first_run: dict[str, Any]) -> None:
    plan = r1.tiny("plan", "--set", "reasoning_rl.kl_coef=0.002")["stages"]
    assert {stage["name"]: stage["why"] for stage in plan}["reasoning_rl"] == "kl_coef: 0.001 -> 0.002"
    ran = [stage["name"] for stage in plan if stage["status"] == "run"]
    assert ran == NAMES[NAMES.index("reasoning_rl") :]
    change = ("--set", "alignment_rl.kl_coef=0.002")
    planned = {p["name"]: {"run": "ran", "reuse": "reused"}[p["status"]] for p in r1.tiny("plan", *change)["stages"]}
    assert [name for name, status in planned.items() if status == "ran"] == ["alignment_rl", "evaluate", "report"]
    assert statuses(r1.tiny("run", *change)) == planned


@pytest.mark.slow
def test_only_a_stage_takes_the_recipes_own_inputs(r1: Any, first_run: dict[str, Any]) -> None:
    alone = r1.tiny("run", "--only", "evaluate", "--set", "evaluate.samples_per_problem=2")
    assert statuses(alone) == {"evaluate": "ran"}
    shown = r1("show", alone["stages"][0]["key"][:12], "--json").stdout
    dev2 = next(s for s in first_run["stages"] if s["name"] == "reasoning_rl")
    assert dev2["key"] in shown  # not the newer one, which another test may have made with another kl_coef


@pytest.mark.parametrize("stage", ["reasoning_rl", pytest.param("alignment_rl", marks=pytest.mark.slow)])
def test_a_field_puts_another_method_in_the_place_of_grpo(r1: Any, first_run: dict[str, Any], stage: str) -> None:
    # SFT is the one that needs another input, the demonstrations: those of the SFT that came before.
    # It measures nothing that tiny's guards of alignment watch.
    changes = (f"{stage}.method=sft", f"{stage}.steps=3", f"{stage}.health={{}}")
    done = r1.tiny("run", "--only", stage, *(part for change in changes for part in ("--set", change)))
    assert statuses(done) == {stage: "ran"}
    manifest = json.loads(r1("show", done["stages"][0]["key"], "--json").stdout)
    assert manifest["config"]["method"] == "sft"
    assert ("cold_start_data" if stage == "reasoning_rl" else "sft_data") in manifest["inputs"]


def test_sft_starts_from_base(r1: Any, first_run: dict[str, Any]) -> None:
    keys = {stage["name"]: stage["key"] for stage in first_run["stages"]}
    manifest = json.loads(next(r1.home.glob(f"artifacts/sft/{keys['sft']}/1/manifest.json")).read_text())
    assert manifest["inputs"]["base"]["key"] == keys["base"]
    assert set(manifest["inputs"]) == {"base", "sft_data"}
    tokenizers = {
        json.loads(path.read_text())["tokenizer_sha256"]
        for stage in ("base", "cold_start_sft", "reasoning_rl", "sft", "alignment_rl")
        for path in r1.home.glob(f"artifacts/{stage}/{keys[stage]}/1/manifest.json")
    }
    assert len(tokenizers) == 1 and None not in tokenizers


@pytest.mark.slow
def test_checkpoints_of_two_recipes_do_not_mix(r1: Any, first_run: dict[str, Any], tmp_path: Path) -> None:
    other = type(r1)(r1.home)
    changed = ("--set", "base.pretrain.vocabulary=360", "--set", "base.pretrain.steps=5")
    base = other.tiny("run", "--only", "base", *changed)["stages"][0]["key"]
    done = r1("run", "tiny", "--only", "evaluate", "--input", f"base={base}")
    assert done.returncode == 2 and "different tokenizers" in done.stderr.splitlines()[-1]


def test_no_held_out_prompt_is_trained_on(r1: Any, first_run: dict[str, Any]) -> None:
    folder = next(r1.home.glob("artifacts/problems/*/1"))
    train, held_out = (read_problems(folder / name) for name in (TRAIN, HELD_OUT))
    assert train and held_out
    assert not {normalise(p.text) for p in train} & {normalise(p.text) for p in held_out}


def test_no_form_or_pair_of_the_general_evaluation_is_in_what_is_trained_on(r1: Any, first_run: dict[str, Any]) -> None:
    keys = {stage["name"]: stage["key"] for stage in first_run["stages"]}
    for stage in ("problems", "base"):
        manifest = json.loads((r1.home / "artifacts" / stage / keys[stage] / "1" / "manifest.json").read_text())
        assert manifest["counts"]["everyday_held_out_seen"] == 0
    folders = {"cold_start_data": "examples", "sft_data": "examples", "reward_models": "data"}
    for stage, folder in folders.items():
        files = list((r1.home / "artifacts" / stage / keys[stage] / "1" / folder).rglob("*.parquet"))
        asked = [
            message["content"]
            for file in files
            for prompt in pq.read_table(file)["prompt"].to_pylist()
            for message in prompt
        ]
        assert asked and held_out_seen(asked) == 0, stage


def test_every_sample_has_its_reason(r1: Any, first_run: dict[str, Any]) -> None:
    key = next(stage["key"] for stage in first_run["stages"] if stage["name"] == "sft_data")
    counts = json.loads(next(r1.home.glob(f"artifacts/sft_data/{key}/1/manifest.json")).read_text())["counts"]
    for domain in ("reasoning", "general"):
        own = {name: n for name, n in counts.items() if name.startswith(f"{domain}_")}
        assert own.pop(f"{domain}_sampled") == sum(own.values()) > 0


def test_mlflow_has_the_runs_the_lineage_and_the_curves(r1: Any, first_run: dict[str, Any]) -> None:
    database = sqlite3.connect(r1.home / "mlflow.db")

    def rows(query: str, *values: str) -> list[Any]:
        return database.execute(query, values).fetchall()

    children = rows(
        "select s.value, r.status from runs r join tags t on t.run_uuid = r.run_uuid "
        "join tags s on s.run_uuid = r.run_uuid and s.key = 'r1flow.stage' "
        "where t.key = 'mlflow.parentRunId' and t.value = ?",
        first_run["run_id"],
    )
    assert sorted(children) == sorted((name, "FINISHED") for name in NAMES)
    steps = rows(
        "select m.step from metrics m join runs r on r.run_uuid = m.run_uuid join tags t on t.run_uuid = r.run_uuid "
        "where r.name like 'reasoning_rl %' and m.key = 'reward_accuracy' "
        "and t.key = 'mlflow.parentRunId' and t.value = ? "
        "order by m.step",
        first_run["run_id"],
    )
    assert [step for (step,) in steps] == [1, 2, 3, 4, 5, 6]
    assert {name for (name,) in rows("select distinct name from datasets")} >= {
        "problems",
        "cold_start_data",
        "sft_data",
    }
    assert {name for (name,) in rows("select distinct name from logged_models")} >= {
        "base",
        "dev1",
        "dev2",
        "dev3",
        "r1",
    }


@pytest.mark.slow
def test_r1_zero_shares_what_it_can(r1: Any, first_run: dict[str, Any]) -> None:
    zero = r1.tiny("run", "--flow", "r1_zero")
    assert statuses(zero) == {
        "problems": "reused", "base": "reused", "r1_zero": "ran", "evaluate": "ran", "report": "ran"
    }  # fmt: skip
    assert list(zero["checkpoints"]) == ["base", "zero"]


def test_stages_show_and_chat(r1: Any, first_run: dict[str, Any]) -> None:
    listed = r1("stages")
    assert listed.returncode == 0 and all(name in listed.stdout for name in NAMES)
    shown = r1("show", "latest:alignment_rl")
    assert "reward_models:" in shown.stdout and shown.stdout.startswith("alignment_rl  ")
    said = r1("chat", "dev1", stdin="compute 3 + 4\n")
    assert said.returncode == 0 and said.stdout.strip()
    assert r1("chat", "base", stdin="compute 3 + 4\n").returncode == 0


def test_force_makes_a_new_attempt(r1: Any, first_run: dict[str, Any]) -> None:
    forced = r1.tiny("run", "--only", "problems", "--force", "problems")
    assert statuses(forced) == {"problems": "ran"}
    attempts = sorted(path.name for path in r1.home.glob(f"artifacts/problems/{forced['stages'][0]['key']}/*"))
    assert attempts == ["1", "2"]
    digests = {json.loads(path.read_text())["digest"] for path in r1.home.glob("artifacts/problems/*/*/manifest.json")}
    assert len(digests) == 1  # the same seed made the same bytes, so nothing downstream is stale


def test_a_failing_stage_says_so(r1: Any, first_run: dict[str, Any], tmp_path: Path) -> None:
    done = r1("run", "tiny", "--only", "cold_start_sft", "--input", f"base={tmp_path}", "--json")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cold_start_sft: ") and "config.json is missing" in last
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert statuses(result) == {"cold_start_sft": "failed"}
    assert "<strong>cold_start_sft failed.</strong>" in Path(result["report"]).read_text()


def test_recipe_sections_have_the_stages_names() -> None:
    assert all(name in Recipe.model_fields for name in [*NAMES, "r1_zero"])
