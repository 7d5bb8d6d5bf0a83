"""The outcome of stages that end in a checkpoint of one trainer."""

from __future__ import annotations

from typing import Any

from flows.stage_contract.stage import Outcome


def checkpoint_outcome(result: dict[str, Any], model: str, **more: Any) -> Outcome:
    """The outcome of a trainer's result, for the checkpoint called `model`. Where the job validates, its choice among
    the steps is there too: `kept_step` among the counts, `kept/METRIC` among the metrics."""
    counts, metrics = dict(result.get("counts", {})), dict(result["metrics"])
    if kept := result.get("kept"):
        counts["kept_step"] = kept["step"]
        metrics[f"kept/{kept['metric']}"] = kept["value"]
    return Outcome(counts=counts, metrics=metrics, steps_completed=result["steps_completed"], model=model, **more)
