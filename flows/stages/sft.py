"""SFT from BASE, not from Dev2, on what Dev2 sampled: Dev3 (R1, stage 3b)."""

from __future__ import annotations

from prefect import flow
from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.stages.contract import Context, Outcome, RunContext, Stage
from flows.stages.runner import run_stage
from flows.stages.sft_data import EXAMPLES
from grpo.config.supervised import SFT


def build(context: Context) -> Outcome:
    """Dev3: fine-tunes the base model on the SFT data."""
    return train(context, base="base", model="dev3")


def train(context: Context, base: str, model: str) -> Outcome:
    """SFT of the input `base` on the SFT data; the checkpoint is called `model`."""
    data = context.path("sft_data") / EXAMPLES
    result = context.run_job("sft", settings=context.config, model=str(context.path(base)), data=data)
    return Outcome(
        counts=result["counts"], metrics=result["metrics"], steps_completed=result["steps_completed"], model=model
    )


STAGE = Stage("sft", 2, ("base", "sft_data"), build)


@flow(name=STAGE.name)
def sft(config: SFT, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune the base model on the rejection-sampled data: Dev3."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
