"""Runs stages in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from pydantic import BaseModel

from flows.home import store
from flows.prefect_server import keeps_runs, without_heartbeat
from flows.progress import Progress, finished_line
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import RunContext, Step, find_key


def run_here(step: Step, config: BaseModel, inputs: Mapping[str, str], seed: int, where: RunContext) -> dict[str, Any]:
    """Runs a stage in this process and returns its flow's result. A stage that is reused gets no flow run if no server
    keeps it; so a recipe whose stages all exist needs no Prefect, which takes a second of a processor to load."""
    _, key = find_key(step.stage, config, inputs, seed)
    reused = not where.force and store().find(key, stage=step.name) is not None
    result: dict[str, Any]
    if reused and not keeps_runs():
        result = run_stage(step.stage, config, inputs, seed, where)
    else:
        from flows.stage_flows import STAGE_FLOWS

        with without_heartbeat() if reused else nullcontext():
            result = STAGE_FLOWS[step.flow_name](config, **step.parameters, inputs=inputs, seed=seed, where=where)
    # The stage's own flow run already has this line; here it goes to the recipe's flow run.
    numbers = {**result["counts"], **result["metrics"]}
    Progress.current().tell(finished_line(result["name"], result["status"], result["seconds"], numbers))
    return result
