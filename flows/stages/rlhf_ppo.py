"""PPO against the reward models, starting from the SFT model, with a KL penalty towards it (InstructGPT, arXiv
2203.02155, step 3).

Departures: two reward models, helpful and safe, as in R1, and their sum instead of one; the value model starts from the
SFT model with a zero head, not from the reward model; no pretraining loss is mixed in (the paper's PPO-ptx).
"""

from __future__ import annotations

from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.reasoning_rl import files, train, user_code
from flows.stages.reward_models import HELPFUL, SAFE


def build(context: Context) -> Outcome:
    """Trains Dev1 by PPO against the reward models."""
    models = context.path("reward_models")
    return train(
        context,
        policy="cold_start_sft",
        model="ppo",
        helpful_model=str(models / HELPFUL),
        safe_model=str(models / SAFE),
    )


STAGE = Stage("rlhf_ppo", 2, ("problems", "cold_start_sft", "reward_models"), build, files=files, extra=user_code)
