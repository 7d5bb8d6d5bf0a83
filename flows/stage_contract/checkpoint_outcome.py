"""The outcome of stages that produce one trainer's checkpoint."""

from __future__ import annotations

from typing import Any

from flows.stage_contract.stage import Outcome


def checkpoint_outcome(result: dict[str, Any], model: str, **more: Any) -> Outcome:
    """The outcome for a trainer's result, with the checkpoint named `model`. If the job validates, it includes the step
    that was chosen: `kept_step` among the counts, `kept/METRIC` among the metrics. Neither if its value is None, as in
    results of earlier versions whose validations were never finite."""
    counts, metrics = dict(result.get("counts", {})), dict(result["metrics"])
    if (kept := result.get("kept")) and kept["value"] is not None:
        counts["kept_step"] = kept["step"]
        metrics[f"kept/{kept['metric']}"] = kept["value"]
    return Outcome(counts=counts, metrics=metrics, steps_completed=result["steps_completed"], model=model, **more)
