"""Cold-start SFT: Base -> Dev1, on response tokens only (R1, stage 1)."""

from __future__ import annotations

from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage
from flows.stage_contract.stage_flow import stage_flow
from flows.stages.cold_start_data import EXAMPLES
from grpo.config.supervised import SFT


def build(context: Context) -> Outcome:
    """Makes Dev1 by fine-tuning the base model on the cold-start demonstrations."""
    data = context.path("cold_start_data") / EXAMPLES
    result = context.run_job("sft", settings=context.config, model=str(context.path("base")), data=data)
    return checkpoint_outcome(result, "dev1")


STAGE = Stage("cold_start_sft", 2, ("base", "cold_start_data"), build)


@stage_flow(STAGE.name)
def cold_start_sft(config: SFT, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune the base model on the demonstrations: Dev1."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
