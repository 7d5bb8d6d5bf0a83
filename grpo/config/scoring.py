"""Settings of the processes that rewards run in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo.settings import Settings


class Scoring(Settings):
    """The processes that rewards run in."""

    workers: int | None = Field(
        None,
        ge=1,
        description="Processes. None: one per CPU core; use more if verifiers wait, for example for a service.",
    )
    time_limit_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for one reward of one completion before it is killed. Up to 2 minutes of waiting for a "
        "CPU do not count. Programs have as long as their tests allow, if that is more.",
    )
    memory_gb: float = Field(4.0, gt=0, description="Address space per process, GB.")
    environment: list[str] = Field(
        [],
        exclude_if=lambda names: not names,
        description="Names of environment variables that the processes keep, for custom rewards that call a service. "
        "All others, including keys, are removed, except PATH, HOME and the like.",
    )
    sandbox: Literal["any", "walls"] = Field(
        "any",
        exclude_if=lambda choice: choice == "any",
        description="Whether model-written programs may run on a machine where one of the sandbox's walls is "
        "unavailable (see the page Sandbox). any: yes, with a warning. walls: no.",
    )
    max_failure_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Maximum share of a rollout's completions whose rewards may fail (timeout, crash, error); above it "
        "the run stops. Failures of a completion's own program in the sandbox do not count.",
    )
