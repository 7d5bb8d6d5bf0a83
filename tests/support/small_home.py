"""A home with two runs of a recipe, written to a real store and a real MLflow as stages write them, in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.records import Problem, Sample, write_rows
from tasks.evaluation.records import SAMPLES, TABLE
from tasks.store.attempt import Attempt
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.names import join_name
from tasks.tracking.reuse import record_reuse
from tasks.tracking.tags import (
    DIGEST_TAG,
    FLOW_TAG,
    KEY_TAG,
    OVERRIDES_TAG,
    SEED_TAG,
    STAGE_TAG,
    STATUS_TAG,
)

PROBLEMS = 4
TABLES: dict[float, dict[str, dict[str, Any]]] = {
    0.001: {
        "dev1": {"pass@1": 0.25, "pass@1_ci95": [0.0, 0.5], "format": 0.5, "problems": 4, "samples": 8, "k": 2},
        "dev2": {"pass@1": 0.5, "pass@1_ci95": [0.25, 0.75], "format": 1.0, "problems": 4, "samples": 8, "k": 2},
    },
    0.01: {
        "dev1": {"pass@1": 0.25, "pass@1_ci95": [0.0, 0.5], "format": 0.5, "problems": 4, "samples": 8, "k": 2},
        "dev2": {"pass@1": 0.75, "pass@1_ci95": [0.5, 1.0], "format": 1.0, "problems": 4, "samples": 8, "k": 2},
    },
}
"""KL coefficient -> closing table."""


@dataclass(frozen=True)
class SmallHome:
    """Its folder, and the MLflow runs: `first` with kl_coef 0.001, `second` with 0.01, both of recipe `sums`."""

    path: Path
    first: str
    second: str

    @property
    def store(self) -> Store:
        return Store(self.path)


def make_small_home(path: Path) -> SmallHome:
    """Two runs of a recipe with the stages problems, cold_start_sft, reasoning_rl and evaluate; the second reuses the
    first two of them."""
    store, record = Store(path), Tracking(default_uri(path))
    first = _run(store, record, 0.001)
    return SmallHome(path, first, _run(store, record, 0.01))


def _run(store: Store, record: Tracking, kl_coef: float) -> str:
    overrides = "" if kl_coef == 0.001 else f"reasoning_rl.kl_coef={kl_coef}"
    config = {"name": "sums", "seed": 0, "reasoning_rl": {"kl_coef": kl_coef, "steps": 3}}
    tags = {FLOW_TAG: "train_r1", SEED_TAG: "0", OVERRIDES_TAG: overrides}
    run_id = record.recipe_run("sums", join_name("sums seed 0", [overrides] if overrides else []), config, tags)

    def stage(name: str, settings: dict[str, Any], inputs: list[Manifest], build: Callable[[Attempt], Any]) -> Manifest:
        settings = {**settings, "seed": 0}
        key = artifact_key(name, 1, settings, {m.stage: m.digest for m in inputs})
        known = store.find(key)
        run_tags = {STAGE_TAG: name, KEY_TAG: key, STATUS_TAG: "ran", SEED_TAG: "0"}
        if known:
            record_reuse(record, run_id, known)
            return known
        stage_run = record.stage_run(run_id, "sums", name, settings, run_tags)
        with store.attempt(name, key) as attempt:
            curve = build(attempt) or []
            record.log_metrics(stage_run, curve)
            refs = {m.stage: m.ref for m in inputs}
            made = attempt.publish(
                stage_version=1,
                config=settings,
                inputs=refs,
                counts={"rows": PROBLEMS},
                metrics={"reward": curve[-1]["reward"]} if curve else {},
                steps_completed=len(curve) or None,
                mlflow_run_id=stage_run,
                seconds=7.0,
            )
        record.set_tags(stage_run, {DIGEST_TAG: made.digest})
        record.finish(stage_run, "FINISHED")
        return made

    problems = stage("problems", {}, [], _write_problems)
    sft = stage("cold_start_sft", {"epochs": 1}, [problems], lambda a: _text(a, "model.safetensors", "weights of dev1"))
    rl = stage("reasoning_rl", {"kl_coef": kl_coef, "steps": 3}, [problems, sft], lambda a: _learn(a, kl_coef))
    stage("evaluate", {"problems": 4, "confidence": 0.95}, [problems, sft, rl], lambda a: _evaluate(a, kl_coef))
    record.finish(run_id, "FINISHED")
    return run_id


def _text(attempt: Attempt, name: str, text: str) -> None:
    (attempt.out / name).write_text(text)


def _write_problems(attempt: Attempt) -> None:
    problems = [_problem(number) for number in range(PROBLEMS)]
    write_rows(attempt.out / "held_out.parquet", problems, Problem)
    write_rows(attempt.out / "train.parquet", [_problem(number) for number in range(10, 16)], Problem)


def _problem(number: int) -> Problem:
    asked = [{"role": "user", "content": f"compute {number} + 1"}]
    return Problem(f"p{number}", asked, str(number + 1), "exact", "reasoning", "en", "sums", {"size": number})


def _learn(attempt: Attempt, kl_coef: float) -> list[dict[str, float]]:
    _text(attempt, "model.safetensors", f"weights of dev2 with {kl_coef}")
    return [{"step": step, "reward": step / 4, "kl": kl_coef * step} for step in (1, 2, 3)]


def _evaluate(attempt: Attempt, kl_coef: float) -> None:
    _text(attempt, TABLE, json.dumps(TABLES[kl_coef]))
    for name, row in TABLES[kl_coef].items():
        folder = attempt.out / SAMPLES / name
        folder.mkdir(parents=True)
        right = round(row["pass@1"] * PROBLEMS)  # the first so many problems are right in both samples
        samples = [
            _sample(name, number, sample, correct=number < right) for number in range(PROBLEMS) for sample in range(2)
        ]
        write_rows(folder / "shard-00000.parquet", samples, Sample)


def _sample(policy: str, number: int, sample: int, *, correct: bool) -> Sample:
    answer = str(number + 1) if correct else "0"
    rewards = {"accuracy": float(correct), "format": 1.0, "language": 1.0}
    return Sample(
        problem_id=f"p{number}",
        policy=policy,
        completion=f"<think>sum</think> <answer>{answer}</answer>",
        reasoning="sum",
        summary=answer,
        answer=answer,
        rewards=rewards,
        tokens=9,
        finish_reason="stop",
        domain="reasoning",
        language="en",
        number=sample,
        source="sums",
    )
