"""Names of the pipelines, for the command line, because flows/prefect_flows.py takes seconds to load."""

from __future__ import annotations

from typing import Literal, get_args

PipelineName = Literal["r1", "r1_zero", "distill", "rlhf_ppo", "dev1", "process_supervision"]
PIPELINE_NAMES: tuple[PipelineName, ...] = get_args(PipelineName)
