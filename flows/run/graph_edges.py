"""Edges in Prefect's graph of a recipe run: from the stage that made an artifact to the stages that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from flows.stage_contract.flow_run import FLOW_RUN


def link_result(summary: Mapping[str, Any]) -> str:
    """The digest of a stage's result. If a later flow run gets this very string object as a parameter, it is drawn
    after the stage's flow run, because Prefect recognizes results by their identity."""
    digest: str = summary["digest"]
    if (flow_run := summary.get(FLOW_RUN)) is not None:
        from prefect.client.schemas.objects import State, StateDetails, StateType
        from prefect.utilities.engine import link_state_to_flow_run_result

        details = StateDetails(flow_run_id=UUID(flow_run))
        link_state_to_flow_run_result(State(type=StateType.COMPLETED, state_details=details), digest)
    return digest
