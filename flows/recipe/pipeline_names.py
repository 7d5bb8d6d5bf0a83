"""Names of the pipelines, for the command line, because flows/prefect_flows.py takes seconds to load."""

from __future__ import annotations

from typing import Literal, get_args

PipelineName = Literal["r1", "r1_zero", "distill", "rlhf_ppo", "dev1", "process_supervision"]
PIPELINE_NAMES: tuple[PipelineName, ...] = get_args(PipelineName)
FLOW_NAMES: dict[PipelineName, str] = {
    "r1": "train_r1",
    "r1_zero": "train_r1_zero",
    "distill": "distill",
    "rlhf_ppo": "rlhf_ppo",
    "dev1": "train_dev1",
    "process_supervision": "process_supervision",
}
"""Name in `--flow` -> name of the flow as runs record it."""
