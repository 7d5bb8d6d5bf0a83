"""Cold-start SFT: Base -> Dev1, on response tokens only (R1, stage 1)."""

from __future__ import annotations

from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.cold_start_data import EXAMPLES


def build(context: Context) -> Outcome:
    """Makes Dev1 by fine-tuning the base model on the cold-start demonstrations."""
    data = context.path("cold_start_data") / EXAMPLES
    result = context.run_job("sft", settings=context.config, model=str(context.path("base")), data=data)
    return checkpoint_outcome(result, "dev1")


STAGE = Stage("cold_start_sft", 2, ("base", "cold_start_data"), build)
