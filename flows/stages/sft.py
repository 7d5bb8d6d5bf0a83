"""SFT from Base, not from Dev2, on what Dev2 sampled: Dev3 (R1, stage 3b)."""

from __future__ import annotations

from typing import Any

from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.sft_data import EXAMPLES, VALIDATION


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
