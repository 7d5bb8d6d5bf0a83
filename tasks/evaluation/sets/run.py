"""Evaluates one model on test sets, without a recipe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo.config.common import Hardware, Sampling, WholeSequences
from grpo.data.records import Problem, read_samples, write_rows
from grpo.data.template import Template
from grpo.settings import Settings
from tasks.evaluation.records import SAMPLES, SETS, TABLE, write_scores
from tasks.evaluation.sets.load import asked, load_set
from tasks.evaluation.sets.metrics import set_metrics, set_scores
from tasks.evaluation.sets.settings import EvaluationSet
from tasks.problems.rows import ROWS_VERSION
from tasks.store.whole_file import write_whole
from tasks.trainer.launch import launch


class ModelEvaluation(Settings):
    """A model, and how it is asked. `policy` is its digest."""

    model: str
    policy: str
    template: Template = "chat"
    zero_template: str | None = None
    sampling: Sampling
    samples_per_problem: int
    hardware: WholeSequences = Hardware()
    confidence: float = 0.95
    seed: int = 0


def read_sets(sets: Sequence[EvaluationSet], seed: int) -> dict[str, list[Problem]]:
    """The problems of each set, by the set's name."""
    return {of.name: asked(of, load_set(of, seed).problems) for of in sets}


def identity(of: ModelEvaluation, sets: Sequence[EvaluationSet], problems: dict[str, list[Problem]]) -> str:
    """A digest of everything that decides the result. It is the same for the same evaluation, wherever its files
    are."""
    settings = of.model_dump(mode="json", exclude={"model", "hardware"})
    asks = [[s.name, s.samples_per_problem, s.k, s.sampling and s.sampling.model_dump(mode="json")] for s in sets]
    rows = [
        [name, [[p.id, p.messages, p.answer, p.verifier, p.metadata] for p in rows]] for name, rows in problems.items()
    ]
    text = json.dumps([settings, of.hardware.dtype, asks, rows, ROWS_VERSION], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def evaluate_model(
    of: ModelEvaluation,
    sets: Sequence[EvaluationSet],
    problems: dict[str, list[Problem]],
    folder: Path,
    on_metrics: Callable[[list[dict[str, Any]]], None],
) -> dict[str, dict[str, Any]]:
    """Test set -> its metrics. Problems, samples, scores and the table stay in `folder`, where a second call continues.

    Raises:
        InputError: the model cannot be loaded or sampled.
        StageFailed: sampling failed.
    """
    if (folder / TABLE).is_file():
        finished: dict[str, dict[str, Any]] = json.loads((folder / TABLE).read_text())
        return finished
    (folder / SETS).mkdir(parents=True, exist_ok=True)
    tasks = []
    for each in sets:
        path = folder / SETS / f"{each.name}.parquet"
        write_rows(path, problems[each.name], Problem)
        tasks.append(
            {
                "name": each.name,
                "model": of.model,
                "policy": of.policy,
                "problems": [str(path)],
                "samples_per_problem": each.samples(of.samples_per_problem),
                "sampling": (each.sampling or of.sampling).model_dump(mode="json"),
                "template": of.template,
                "zero_template": of.zero_template,
            }
        )
    work = folder / "work"
    paths = {name: str(work / file) for name, file in (("metrics", "metrics.jsonl"), ("result", "result.json"))}
    job = {"kind": "sample", "out": str(folder / SAMPLES), "state": str(work / "state"), "seed": of.seed, **paths}
    hardware = of.hardware.model_dump(mode="json")
    launch({**job, "tasks": tasks, "hardware": hardware}, work, on_metrics=on_metrics)
    scores, table = {}, {}
    for each in sets:
        by_id = {problem.id: problem for problem in problems[each.name]}
        samples = read_samples(folder / SAMPLES / each.name)
        scores[each.name] = set_scores(samples, by_id, each.k)
        table[each.name] = set_metrics(samples, by_id, scores[each.name], of.confidence, each.k)
    write_scores(folder, scores)
    write_whole(folder / TABLE, json.dumps(table, indent=2))
    return table
