"""Replies are kept: nothing is asked twice, a budget is a limit, and a damaged file costs its replies alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.judging.create_voter import make_voter
from grpo.judging.replies import Reply
from grpo.judging.reply_cache import BudgetSpent, RepliesStore
from grpo.judging.voting import Claim, Voter
from tests.support.faulty_endpoint import FaultyEndpoint
from tests.support.job_runner import ROOT

CLAIMS = [Claim("1 + 1?", "2", f"{number}") for number in range(6)]


def right(number: int, body: dict[str, Any]) -> str:
    two = "<answer_to_check>\n2\n" in body["messages"][0]["content"]
    return json.dumps({"analysis": "", "correctness": "correct" if two else "incorrect"})


EXPECTED = [False, False, True, False, False, False]


@pytest.fixture
def endpoint() -> Iterator[FaultyEndpoint]:
    running = FaultyEndpoint(right)
    yield running
    running.close()


def voter(endpoint: FaultyEndpoint, folder: Path | None, processes: int = 1, **settings: Any) -> Voter:
    fast = {"backoff_s": 0.01, "retries": 1, "away_max_s": 0.3, "concurrency": 2, "ask_again": False, **settings}
    asked = JudgeSettings(kind="openai", base_url=endpoint.url, model="m", **fast)
    return make_voter(asked, folder, processes)


def test_what_was_answered_is_not_asked_again(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    first = voter(endpoint, tmp_path)
    assert first.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == 6
    assert first.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == 6
    first.close()
    second = voter(endpoint, tmp_path)
    assert second.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == 6
    assert second.counts["remembered"] == second.counts["asked"] == 6 and second.counts["requests"] == 0
    assert second.counts.verdicts() == {"asked": 6, "items": 6, "outcome/decided": 6}
    assert first.counts.verdicts() == {name: 2 * count for name, count in second.counts.verdicts().items()}
    assert second.counts.cost().keys() == {"remembered", "seconds"} and first.counts.cost()["requests"] == 6
    second.close()
    other = voter(endpoint, tmp_path, max_tokens=99)  # other settings are not remembered
    assert other.correct_all(CLAIMS[:1]) == [False] and len(endpoint.bodies) == 7
    other.close()


def test_a_reply_that_was_changed_on_disk_is_asked_for_again(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    first = voter(endpoint, tmp_path)
    assert first.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == 6
    first.close()
    (path,) = tmp_path.glob("*.sqlite")
    damaged = path.read_bytes().replace(b'"incorrect"', b'"inco"rect"', 1)
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    second = voter(endpoint, tmp_path)
    assert second.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == 7
    second.close()


@pytest.mark.parametrize("stored", [True, False])
def test_progress_counts_stored_replies_too(endpoint: FaultyEndpoint, tmp_path: Path, stored: bool) -> None:
    first = voter(endpoint, tmp_path if stored else None)
    first.correct_all(CLAIMS[:4])
    told: list[tuple[int, int]] = []
    first.on_progress = lambda done, of: told.append((done, of))
    assert first.correct_all(CLAIMS) == EXPECTED and len(endpoint.bodies) == (6 if stored else 10)
    assert told == sorted(told) and told[-1] == (6, 6)
    if stored:
        assert (4, 6) in told
    first.close()


def test_votes_are_remembered_one_by_one(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    first = voter(endpoint, tmp_path, votes=3, temperature=0.7)
    assert first.correct_all(CLAIMS[:1]) == [False] and len(endpoint.bodies) == 2  # the third could change nothing
    assert first.correct_all(CLAIMS[:1]) == [False] and len(endpoint.bodies) == 2
    first.close()


def test_an_endpoint_that_goes_away_costs_no_reply(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    endpoint.plan = lambda number, body: right(number, body) if number < 4 else "500"
    first = voter(endpoint, tmp_path, concurrency=1)
    with pytest.raises(ConnectionError, match="nothing is lost"):
        first.correct_all(CLAIMS)
    first.close()
    endpoint.plan = right
    before = len(endpoint.bodies)
    second = voter(endpoint, tmp_path)
    assert second.correct_all(CLAIMS) == EXPECTED
    # A retry of the first may still have been on its way: what counts is which questions are asked again.
    assert len({json.dumps(body["messages"]) for body in endpoint.bodies[before:]}) == 2
    second.close()


@pytest.mark.parametrize("folder", [True, False])
def test_the_budget_is_a_limit_and_more_of_it_goes_on(endpoint: FaultyEndpoint, tmp_path: Path, folder: bool) -> None:
    where = tmp_path if folder else None
    first = voter(endpoint, where, budget_requests=4)
    with pytest.raises(BudgetSpent, match="budget_requests is spent .4 in this process.*raise it and run again"):
        first.correct_all(CLAIMS)
    assert len(endpoint.bodies) == 4
    first.close()
    second = voter(endpoint, where, budget_requests=6)
    assert second.correct_all(CLAIMS) == EXPECTED
    assert len(endpoint.bodies) == (6 if folder else 10)
    second.close()


def test_a_budget_of_tokens_is_checked_before_each_request(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    first = voter(endpoint, tmp_path, budget_tokens=25, concurrency=1)  # a request takes 7 + 3
    with pytest.raises(BudgetSpent, match="budget_tokens is spent"):
        first.correct_all(CLAIMS)
    assert len(endpoint.bodies) == 3
    first.close()


def test_processes_have_parts_of_the_budget(endpoint: FaultyEndpoint, tmp_path: Path) -> None:
    first = voter(endpoint, tmp_path, processes=2, budget_requests=4)
    with pytest.raises(BudgetSpent):
        first.correct_all(CLAIMS)
    assert len(endpoint.bodies) == 2
    first.close()


def test_each_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    held = RepliesStore(tmp_path)
    code = (
        "import sys, pathlib; from grpo.judging.reply_cache import RepliesStore; "
        "from grpo.judging.replies import Reply; "
        "RepliesStore(pathlib.Path(sys.argv[1])).add('a', Reply('yes', tokens=5))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    assert held.get("a") is None
    second = RepliesStore(tmp_path)
    assert second.get("a") == Reply("yes", tokens=5) and (second.requests, second.tokens) == (1, 5)
    held.close()
    second.close()


def test_a_damaged_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RepliesStore(tmp_path)
    store.add("a", Reply("yes"))
    store.close()
    (file,) = tmp_path.glob("*.sqlite")
    file.write_bytes(b"no database at all" * 100)
    store = RepliesStore(tmp_path)
    assert store.get("a") is None and "is damaged" in caplog.text
    store.add("b", Reply("no"))
    assert store.get("b") == Reply("no")
    store.close()
    file.write_bytes(b"damaged once more")
    RepliesStore(tmp_path).close()
    assert {path.read_bytes()[:7] for path in tmp_path.glob("replies-0.damaged-*")} == {b"no data", b"damaged"}


def test_a_disk_that_takes_nothing_is_an_error_and_moves_no_file(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, signal, sys; from grpo.judging.reply_cache import RepliesStore; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)); "
        "RepliesStore(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("sqlite3.OperationalError: ")
    assert not [*tmp_path.glob("*.damaged*")]
