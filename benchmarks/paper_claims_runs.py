"""Runs of the study of the papers' claims: each is the recipe with overrides, up to an evaluation of one checkpoint.

Arms share artifacts, a killed run goes on from its checkpoint, and `--dispatch` sends each stage to its work pool.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from paper_claims_design import Choice, Design, Graph, Run, overrides_of, start_of
from paper_claims_graphs import CHECKPOINT, GRAPHS, RL_STAGE
from paper_claims_plan import Journal, current, lacking
from prefect import flow

from flows import runs as tracked_runs
from flows.home import home, store, tracking
from flows.prefect_server import keeps_runs, prefect_server
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.run.executor import RecipeFailed, run_recipe
from flows.run.plan import StageSelection
from flows.stage_contract.stage import Step
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
    force: list[str],
    evaluated: bool,
    dispatch: bool,
) -> dict[str, Any]:
    """One run of an arm, without its evaluation unless it is `evaluated`."""
    selection = StageSelection(start=start, inputs=inputs, force=force)

    def steps(of: Recipe) -> Sequence[Step]:
        return [step for step in GRAPHS[graph](of) if evaluated or step.name != "evaluate"]

    return run_recipe("paper_claims", steps, recipe, overrides, seed, selection, dispatch)


def execute(
    design: Design, runs: Sequence[Run], choices: Mapping[str, Choice], journal: Journal, dispatch: bool, parent: int
) -> None:
    """Executes the runs that have no record yet, one after the other. Stops after a run if the process `parent` has
    ended.

    Raises:
        InputError: the stages are to be dispatched, and the home has no servers; or a run has not all measures.
        RecipeFailed: a stage failed, and not because training diverged.
    """
    if dispatch and not keeps_runs():
        raise InputError(f"--dispatch needs `r1 up` in the home of the study; start it with R1FLOW_HOME={home()}")
    tracking().open()
    with prefect_server(home() / "logs"):
        for run in runs:
            if os.getppid() != parent:
                return
            if run in current(design, journal.records(), choices):
                continue  # made since the list of runs was
            for force in (False, True, True):  # the second try may go on with what a killed one has left
                record = _attempt(design, run, choices, force, dispatch)
                if (lack := lacking(design, run.arm, record)) is None:
                    break
                print(f"{run.name}: its record lacks the {lack}; RL is made again", file=sys.stderr, flush=True)
            else:
                raise InputError(f"{run.name}: three tries gave no {lack}")
            journal.add(run, record)


def _attempt(design: Design, run: Run, choices: Mapping[str, Choice], force: bool, dispatch: bool) -> dict[str, Any]:
    """Makes what a run needs, RL again if `force`, and returns the record."""
    arm, overrides = design.arms[run.arm], overrides_of(design, run, choices)
    start, inputs, first_artifacts = None, dict[str, str](), dict[str, str]()
    defined = start_of(design, run, choices)
    record: dict[str, Any] = {"overrides": overrides, "graph": arm.graph, "start": defined}
    try:
        if defined is not None:
            assert arm.after is not None
            first, before = Run(**defined["run"]), design.arms[arm.after]
            # Reused where it was made in this home. Elsewhere it may have other keys: CPUs round differently.
            given = (first.name, before.graph, design.recipe, defined["overrides"], run.seed)
            made = paper_claims(*given, None, {}, [], False, dispatch)
            keys = {stage["name"]: stage["key"] for stage in made["stages"]}
            inputs = {"cold_start_sft": keys["reasoning_rl"], **{name: keys[name] for name in arm.keeps}}
            start = "reasoning_rl" if "process_reward_model" in arm.keeps else "process_reward_model"
            first_artifacts = digests(made)
        forced = [RL_STAGE[arm.graph]] if force and arm.graph in RL_STAGE else []
        given = (run.name, arm.graph, design.recipe, overrides, run.seed)
        result = paper_claims(*given, start, inputs, forced, arm.evaluated, dispatch)
    except RecipeFailed as error:
        if (reason := divergence(error)) is None:
            raise
        return {**record, "diverged": reason}
    record |= record_of(design, run, overrides, result)
    return {**record, "artifacts": {**first_artifacts, **digests(result)}}


def divergence(error: RecipeFailed) -> str | None:
    """What a check of training health stopped RL for, if that is what failed: values that are not finite, or a policy
    that is no longer the sampler's."""
    found = re.search(r"training stopped: ((?:not_finite|mismatch_growth): .*?)(?:; log: |$)", str(error))
    return found[1] if found else None


def digests(result: Mapping[str, Any]) -> dict[str, str]:
    """Key -> digest of the artifacts of a run."""
    found = {stage["key"]: store().find(stage["key"], compare=False) for stage in result["stages"]}
    return {key: manifest.digest for key, manifest in found.items() if manifest is not None}


def record_of(design: Design, run: Run, overrides: Sequence[str], result: Mapping[str, Any]) -> dict[str, Any]:
    """The measures of a run: `table`, its row of the closing table; `keys` and `seconds` of its stages (RL is "rl" in
    `seconds`); for arms with RL also `curve` and `peak_mb`.

    `curve` has per step the number of `tokens` sampled, the mean `accuracy` of the sampled completions, their mean
    `length` in tokens and, where it is rewarded, the `format` rate; None if MLflow does not have every step. `peak_mb`
    is in MiB; None if RL was killed and continued, because then it is unknown.
    """
    graph = design.arms[run.arm].graph
    stages = {stage["name"]: stage for stage in result["stages"]}
    record: dict[str, Any] = {
        "table": result["checkpoints"].get(CHECKPOINT[graph], {}),
        "keys": {name: stage["key"] for name, stage in stages.items()},
        "seconds": {name: stage["seconds"] for name, stage in stages.items()},
    }
    if (name := RL_STAGE.get(graph)) is None:
        return record
    settings = getattr(load_recipe(design.recipe, overrides, run.seed), name)
    frame = tracked_runs.load(result["run_id"]).curves(name)
    record["curve"] = curve_of(frame, settings.steps, settings.prompts_per_step * settings.group_size)
    manifest = store().find(stages[name]["key"])
    assert manifest is not None, f"{name} has just been made or reused"
    peak = manifest.peak_memory
    record["peak_mb"] = peak / 2**20 if peak else None
    record["seconds"]["rl"] = record["seconds"].pop(name)
    return record


def curve_of(frame: pd.DataFrame, steps: int, completions: int) -> dict[str, list[float]] | None:
    """A record's curve from the metrics of RL, a row per step with `completions` each; None without all `steps`."""
    columns = {"completion_tokens": "length", "reward_accuracy": "accuracy"}
    if not {*columns} <= {*frame.columns}:
        return None
    columns |= {"reward_format": "format"} if "reward_format" in frame else {}
    whole = frame[[*columns]].dropna()
    if len(whole) != steps:
        return None
    lengths = whole["completion_tokens"].tolist()
    tokens = [round(length * completions) for length in lengths]
    return {"tokens": tokens, **{name: whole[column].tolist() for column, name in columns.items()}}
