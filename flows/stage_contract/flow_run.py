"""The current flow run, and the flow runs of stages in their summaries, for code that also runs without Prefect."""

from __future__ import annotations

import sys

FLOW_RUN = "flow_run"
"""Entry of a stage's summary: id of the flow run that made or found the artifact. Absent without a flow run."""


def flow_run_id() -> str | None:
    """The id of the current flow run; None outside of a flow. A process that has not loaded Prefect runs no flow."""
    if "prefect.context" not in sys.modules:
        return None
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else None
