"""The form in which Prefect's UI asks a person to approve a gate."""

from __future__ import annotations

from prefect import pause_flow_run, suspend_flow_run
from prefect.context import FlowRunContext
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from pydantic import Field

from flows.progress import Progress
from tasks.gates.conditions import Gate, Verdict

POLL_S = 5
RETRIES = 10
"""Retries of a waiting run that cannot reach its server. Pauses double, since a server may be away for half an hour."""


class Approval(RunInput):
    """The approval form in Prefect."""

    approve: bool = Field(False, description="Go on. Otherwise the run ends.")
    note: str = Field("", description="Why, for the record.")
    who: str = Field("", description="Your name, for the record.")


class Undecided(Exception):
    """Nobody answered in time."""


def ask(gate: Gate, verdict: Verdict, said: str, pause_key: str) -> Approval:
    """Waits for the answer; a deployed run is suspended in the meantime. `said`: why the gate asks.

    `pause_key` stays the same when a suspended run starts again, so that Prefect returns the answer instead of asking
    again. It changes after a refusal, and with the evidence.

    Raises:
        Undecided: nobody answered within the gate's hours.
    """
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    form = Approval.with_initial_data(description=verdict.markdown())
    seconds = round(gate.wait_hours * 3600)
    Progress.current().say(f"{said}; flow run {context.flow_run.name!r} waits for approval in Prefect")
    try:
        if context.flow_run.deployment_id is not None and context.flow_run.parent_task_run_id is None:
            return suspend_flow_run(wait_for_input=form, timeout=seconds, key=pause_key)
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: RETRIES}):
            return pause_flow_run(wait_for_input=form, timeout=seconds, poll_interval=POLL_S, key=pause_key)
    except FlowPauseTimeout:
        raise Undecided from None
