"""Edges in Prefect's graph of a recipe run: from the stage that made an artifact to the stages that read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State, StateDetails, StateType
from prefect.utilities.engine import link_state_to_flow_run_result


def link_result(summary: Mapping[str, Any]) -> str:
    """The key of a stage's result. If a later flow run gets this very string object as a parameter, it is drawn after
    the stage's flow run, because Prefect recognizes results by their identity."""
    key: str = summary["key"]
    if summary["flow_run"] is not None:
        details = StateDetails(flow_run_id=UUID(summary["flow_run"]))
        link_state_to_flow_run_result(State(type=StateType.COMPLETED, state_details=details), key)
    return key
