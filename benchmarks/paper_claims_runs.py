"""Runs of the study of the papers' claims: each is the recipe with overrides, up to an evaluation of one checkpoint.

The graphs are made of the recipe's own stages, so that arms share artifacts, a killed run goes on from its checkpoint,
and `--dispatch` sends each stage to its work pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from paper_claims_design import Choice, Design, Graph, Run, overrides_of
from paper_claims_plan import Journal
from prefect import flow

from flows import runs as tracked_runs
from flows.home import home, store, tracking
from flows.prefect_server import keeps_runs, prefect_server
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.run.executor import run_recipe
from flows.run.plan import StageSelection
from flows.stage_contract.stage import Step, section_of
from flows.stage_graphs import R1_ZERO, TO_DEV1, TO_SFT_DATA, as_configured, evaluation_and_report
from flows.stages import base_model, reasoning_rl
from flows.stages import distill as distillation
from grpo.errors import InputError

STUDENT = "small"
"""Name of the smaller model, the recipe's first student."""
RL_STAGE: Mapping[Graph, str] = {"rl": "reasoning_rl", "small": "reasoning_rl", "zero": "r1_zero"}
CHECKPOINT: Mapping[Graph, str] = {"dev1": "dev1", "rl": "dev2", "small": "dev2", "zero": "zero", "distill": STUDENT}
"""Graph -> name of the checkpoint in the closing table."""


def _evaluation(*stages: str) -> Step:
    return evaluation_and_report(*stages)[0]


RL = Step(reasoning_rl.STAGE)
SMALL_BASE = Step(
    base_model.base_stage(STUDENT),
    "base",
    {"student": STUDENT},
    section=lambda recipe: section_of(recipe, "distill").students[0].base,
)
STUDENT_SFT = Step(
    distillation.student_stage(STUDENT),
    "student",
    {"name": STUDENT},
    section=lambda recipe: section_of(recipe, "distill").students[0].sft,
)


def _from_small_base(step: Step) -> Step:
    return replace(step, takes={**step.takes, "base": SMALL_BASE.name}) if "base" in step.stage.needs else step


GRAPHS: Mapping[Graph, Callable[[Recipe], Sequence[Step]]] = {
    "dev1": partial(as_configured, (*TO_DEV1, _evaluation("cold_start_sft"))),
    "rl": partial(as_configured, (*TO_DEV1, RL, _evaluation("reasoning_rl"))),
    "zero": lambda recipe: R1_ZERO[:-1],  # without the report
    "small": partial(
        as_configured,
        (
            TO_DEV1[0],
            SMALL_BASE,
            *map(_from_small_base, TO_DEV1[2:]),
            RL,
            _evaluation("reasoning_rl"),
        ),
    ),
    "distill": partial(as_configured, (*TO_SFT_DATA, SMALL_BASE, STUDENT_SFT, _evaluation(STUDENT_SFT.name))),
}


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
                before = records[first]["keys"]
                if any(store().find(key) is None for key in before.values()):  # recorded in another home
                    first_overrides = records[first]["overrides"]
                    graph = design.arms[arm.after].graph
                    paper_claims(first.name, graph, design.recipe, first_overrides, run.seed, None, {}, dispatch)
                inputs = {"cold_start_sft": before["reasoning_rl"], **{name: before[name] for name in arm.keeps}}
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
