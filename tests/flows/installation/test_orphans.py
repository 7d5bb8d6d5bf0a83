"""Recipes that lost their process, on a real Prefect server: a crash uses up a start, an approval does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Running, Scheduled, Suspended
from prefect.testing.utilities import prefect_test_harness

from flows.installation.orphans import OrphanSweeper
from flows.prefect_flows import RECIPE_FLOWS
from flows.run.dispatch_decisions import TRIES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[SyncPrefectClient]:
    with prefect_test_harness(server_startup_timeout=None), get_client(sync_client=True) as client:
        yield client


def swept(client: SyncPrefectClient, run: FlowRun) -> str | None:
    """The name of the run's state after it crashed and the sweeper saw that."""
    client.set_flow_run_state(run.id, Crashed(), force=True)
    OrphanSweeper(client, recipes={run.id}).sweep()
    found = client.read_flow_run(run.id).state
    return found and found.name


def test_approvals_do_not_use_up_the_starts_of_a_recipe(client: SyncPrefectClient) -> None:
    run = client.create_flow_run(RECIPE_FLOWS["r1"])
    for state in (Running(), Suspended(), Scheduled(), Running(), Suspended(), Scheduled(), Running()):
        client.set_flow_run_state(run.id, state, force=True)
    assert client.read_flow_run(run.id).run_count == TRIES == 3
    ends = []
    for _ in range(TRIES):
        ends.append(swept(client, run))
        client.set_flow_run_state(run.id, Running(), force=True)
    assert ends == ["AwaitingRetry", "AwaitingRetry", "Crashed"]


def test_late_heartbeats_do_not_use_up_the_starts_of_a_recipe(client: SyncPrefectClient) -> None:
    run = client.create_flow_run(RECIPE_FLOWS["r1"])
    for state in (Running(), Crashed(), Running(), Crashed(), Running(), Crashed(), Running()):
        client.set_flow_run_state(run.id, state, force=True)
    assert swept(client, run) == "AwaitingRetry"
