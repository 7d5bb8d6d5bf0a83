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
        description="Processes. None: one a processor core; more of them where verifiers wait, for a service say.",
    )
    time_limit_s: float = Field(
        10.0,
        gt=0,
        description="Seconds for one reward of one completion, then it is killed. Time that it waits for a processor "
        "does not count, up to 2 minutes of it.",
    )
    memory_gb: float = Field(4.0, gt=0, description="Address space of a process, GB.")
    environment: list[str] = Field(
        [],
        exclude_if=lambda names: not names,
        description="Environment variables that the processes keep, by name, for rewards of your own that call a "
        "service. All others but PATH, HOME and their like are left out, keys among them.",
    )
    sandbox: Literal["any", "walls"] = Field(
        "any",
        exclude_if=lambda choice: choice == "any",
        description="Whether programs that a model wrote may run on a machine where a wall of the sandbox does not "
        "stand (the page Sandbox). any: yes, with a warning. walls: no.",
    )
    max_failure_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a rollout's completions whose rewards may fail (time-out, crash, error) before the run "
        "stops. What a completion's own program does inside the sandbox does not count.",
    )
