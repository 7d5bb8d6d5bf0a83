"""Runs of the study of the papers' claims: each is the recipe with overrides, up to an evaluation of one checkpoint.

Arms share artifacts, a killed run goes on from its checkpoint, and `--dispatch` sends each stage to its work pool.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from paper_claims_design import Choice, Design, Graph, Run, overrides_of
from paper_claims_graphs import CHECKPOINT, GRAPHS, RL_STAGE
from paper_claims_plan import Journal
from prefect import flow

from flows import runs as tracked_runs
from flows.home import home, store, tracking
from flows.prefect_server import keeps_runs, prefect_server
from flows.recipe.load import load_recipe
from flows.run.executor import run_recipe
from flows.run.plan import StageSelection
from grpo.errors import InputError


@flow(name="paper-claims", flow_run_name="{name}")
def paper_claims(
    name: str,
    graph: Graph,
    recipe: str,
    overrides: list[str],
    seed: int,
    start: str | None,
    inputs: dict[str, str],
    dispatch: bool,
) -> dict[str, Any]:
    """One run of an arm."""
    selection = StageSelection(start=start, inputs=inputs)
    return run_recipe("paper_claims", GRAPHS[graph], recipe, overrides, seed, selection, dispatch)


def execute(
    design: Design, runs: Sequence[Run], choices: Mapping[str, Choice], journal: Journal, dispatch: bool, parent: int
) -> None:
    """Executes the runs that have no record yet, one after the other. Stops after a run if the process `parent` has
    ended.

    Raises:
        InputError: the stages are to be dispatched, and the home has no servers.
        RecipeFailed: a stage failed.
    """
    if dispatch and not keeps_runs():
        raise InputError(f"--dispatch needs `r1 up` in the home of the study; start it with R1FLOW_HOME={home()}")
    tracking().open()
    with prefect_server(home() / "logs"):
        for run in runs:
            if os.getppid() != parent:
                return
            records = journal.records()
            overrides = overrides_of(design, run, choices)
            if run in records and records[run]["overrides"] == overrides:
                continue
            arm = design.arms[run.arm]
            start, inputs = None, dict[str, str]()
            if arm.after is not None:
                first = Run(arm.after, run.seed, *astuple(choices[arm.after]))
                graph, first_overrides = design.arms[arm.after].graph, records[first]["overrides"]
                # Reused where it was made in this home. Elsewhere it may have other keys: CPUs round differently.
                made = paper_claims(first.name, graph, design.recipe, first_overrides, run.seed, None, {}, dispatch)
                keys = {stage["name"]: stage["key"] for stage in made["stages"]}
                inputs = {"cold_start_sft": keys["reasoning_rl"], **{name: keys[name] for name in arm.keeps}}
                start = "reasoning_rl" if "process_reward_model" in arm.keeps else "process_reward_model"
            result = paper_claims(run.name, arm.graph, design.recipe, overrides, run.seed, start, inputs, dispatch)
            journal.add(run, {"overrides": overrides, **record_of(design, run, overrides, result)})


def record_of(design: Design, run: Run, overrides: Sequence[str], result: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run: `table`, its row of the closing table; `keys` and `seconds` of its stages (RL is "rl" in
    `seconds`); for arms with RL also `curve` and `peak_mb`.

    `curve` has per step the number of `tokens` sampled, the mean `accuracy` of the sampled completions and their mean
    `length` in tokens. `peak_mb` is in MiB; None if RL was killed and continued, because then it is unknown.

    Raises:
        RuntimeError: MLflow does not have every step of the curve.
    """
    graph = design.arms[run.arm].graph
    stages = {stage["name"]: stage for stage in result["stages"]}
    record: dict[str, Any] = {
        "table": result["checkpoints"][CHECKPOINT[graph]],
        "keys": {name: stage["key"] for name, stage in stages.items()},
        "seconds": {name: stage["seconds"] for name, stage in stages.items()},
    }
    if (name := RL_STAGE.get(graph)) is None:
        return record
    settings = getattr(load_recipe(design.recipe, overrides, run.seed), name)
    frame = tracked_runs.load(result["run_id"]).curves(name)[["completion_tokens", "reward_accuracy"]].dropna()
    lengths, accuracy = frame["completion_tokens"].tolist(), frame["reward_accuracy"].tolist()
    if len(lengths) != settings.steps:
        raise RuntimeError(f"{run.name}: MLflow has {len(lengths)} of {settings.steps} steps of {name}")
    completions = settings.prompts_per_step * settings.group_size
    manifest = store().find(stages[name]["key"])
    assert manifest is not None, f"{name} has just been made or reused"
    peak = manifest.peak_memory
    record["curve"] = {"tokens": [round(n * completions) for n in lengths], "accuracy": accuracy, "length": lengths}
    record["peak_mb"] = peak / 2**20 if peak else None
    record["seconds"]["rl"] = record["seconds"].pop(name)
    return record
