"""R1-Zero: GRPO from the base model with a plain-text template, without SFT (R1, section 2)."""

from __future__ import annotations

from prefect.states import State

from flows.recipe.forms import Inputs, Seed
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage
from flows.stage_contract.stage_flow import stage_flow
from flows.stages.base_model import zero_template
from flows.stages.reasoning_rl import files, train, user_code
from grpo.config.rl import RL


def build(context: Context) -> Outcome:
    """Makes R1-Zero by training the base model with reinforcement learning."""
    template = zero_template(context.path("base"))
    return train(context, policy="base", model="zero", template="r1_zero", zero_template=template)


STAGE = Stage("r1_zero", 5, ("problems", "base"), build, files=files, extra=user_code)


@stage_flow(STAGE.name)
def r1_zero(config: RL, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """GRPO from the base model with rule rewards only: R1-Zero."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
