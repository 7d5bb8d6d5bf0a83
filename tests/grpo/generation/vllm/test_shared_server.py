"""Processes that share a vLLM server with sleep mode send it to sleep, and wake it, once for all."""

from __future__ import annotations

import pytest

from tests.support.parallel_jobs import ALONE, Team
from tests.support.sleeping_server import SleepingServer, faults, sample_in_rounds

ROUND = ["/wake_up", "begun", "ended", "/sleep"]


@pytest.mark.system
def test_the_server_sleeps_once_all_ranks_have_their_completions(model_folder):
    """Rank 0 has no prompts, and rank 1 waits a second for its completion."""
    team = Team(2)
    try:
        with SleepingServer(model_folder) as server:
            assert team(sample_in_rounds, model_folder, server.url, 2) == [[0, 0], [1, 1]]
    finally:
        team.dismiss()
    assert server.events == ROUND * 2


def test_a_process_alone_needs_no_others(model_folder):
    with SleepingServer(model_folder) as server:
        assert sample_in_rounds(ALONE, model_folder, server.url, 1) == [1]
    assert server.events == ROUND


@pytest.mark.system
def test_all_ranks_stop_if_the_server_refuses(model_folder):
    team = Team(2)
    try:
        with SleepingServer(model_folder, refuses=["/sleep", "/wake_up"]) as server:
            for call in ("wake", "sleep"):
                said = team(faults, model_folder, server.url, call)
                assert said == [f"vllm: {server.url} refused: status 400: null"] * 2
        assert server.events == ["/wake_up", "/sleep"]
    finally:
        team.dismiss()
