"""SFT from Base, not from Dev2, on what Dev2 sampled: Dev3 (R1, stage 3b)."""

from __future__ import annotations

from typing import Any

from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage
from flows.stage_contract.stage_flow import stage_flow
from flows.stages.sft_data import EXAMPLES, VALIDATION
from grpo.config.supervised import SFT


def build(context: Context) -> Outcome:
    """Makes Dev3 by fine-tuning the base model on the SFT data."""
    return train(context, base="base", model="dev3")


def train(context: Context, base: str, model: str) -> Outcome:
    """SFT of the input `base` on the SFT data. The checkpoint is named `model`."""
    samples = context.path("sft_data")
    job: dict[str, Any] = {"settings": context.config, "model": str(context.path(base)), "data": samples / EXAMPLES}
    if context.config.validate_every and (held_out := samples / VALIDATION).is_dir():
        job["validation_data"] = held_out
    result = context.run_job("sft", **job)
    return checkpoint_outcome(result, model)


STAGE = Stage("sft", 2, ("base", "sft_data"), build)


@stage_flow(STAGE.name)
def sft(config: SFT, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune the base model on the rejection-sampled data: Dev3."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
