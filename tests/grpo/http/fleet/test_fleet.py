"""A fleet on real sockets: every request has one answer, whatever the endpoints do."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from grpo.http.client import Away, Refused
from grpo.http.fleet.addresses import Addresses
from grpo.http.fleet.fleet import Fleet
from grpo.http.fleet.member import Member
from grpo.http.fleet.members import Members
from tests.support.model_service import ModelService


@contextlib.contextmanager
def fleet(
    services: Sequence[ModelService],
    limit: int = 4,
    retries: int = 8,
    timeout_s: float = 30,
    copy_after: float | None = 3.0,
    addresses: Addresses | None = None,
) -> Iterator[Fleet[int, int]]:
    """Its answers are the seeds that were sent."""
    members = Members(
        addresses or Addresses([service.url for service in services], None),
        lambda url: Member(url, timeout_s, None, limit, None),
        retries,
    )

    def send(member, seed, cancellation):
        member.http.post(f"{member.path}/chat/completions", {"seed": seed}, cancellation=cancellation)
        return seed

    made: Fleet[int, int] = Fleet(members, send, retries, copy_after)
    try:
        yield made
    finally:
        for service in services:
            service.freed.set()
        made.close()


@pytest.fixture
def services() -> Iterator[list[ModelService]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ModelService(seconds=0.005)) for _ in range(3)]


def answered_once(fleet: Fleet[int, int], count: int) -> None:
    answers = [*fleet.answers(range(100, 100 + count))]
    assert sorted(answers) == [(n, 100 + n) for n in range(count)]


def test_all_endpoints_share_the_requests_within_their_limits(services):
    with fleet(services, copy_after=None) as made:
        answered_once(made, 120)
        assert made.counts == {"sent": 120, "answered": 120}
    assert Counter(seed for service in services for seed in service.seeds) == Counter(range(100, 220))
    assert all(service.most_at_once <= 4 and len(service.seeds) > 10 for service in services)


def test_a_slow_endpoint_gets_less(services):
    services[0].seconds = 1.0
    with fleet(services) as made:
        answered_once(made, 150)
    assert len(services[0].seeds) < 30 < len(services[1].seeds)


def test_requests_of_earlier_calls_go_first(services):
    with fleet(services[:1], limit=1) as made:

        def ask(items: range) -> None:
            assert len([*made.answers(items)]) == len(items)

        first = threading.Thread(target=ask, args=(range(100, 130),))
        first.start()
        while not services[0].seeds:
            time.sleep(0.001)
        ask(range(2))
        first.join()
    assert services[0].seeds == [*range(100, 130), 0, 1]


def test_an_endpoint_that_takes_two_at_once_is_not_given_more_for_long(services):
    services[0].room = 2
    services[0].seconds = 0.1  # handing an answer over counts as in flight, too: this is much longer
    with fleet(services[:1], limit=16) as made:
        answered_once(made, 60)
        (member,) = made.members
        assert member.limit.requests < 8  # from 4 that would need 4 + 5 + 6 + 7 answers in a row, none of them refused
    # 16, 8 and 4 at once: 14, 6 and 2 are refused. Then it has one more now and then, at most once in two answers.
    assert services[0].requests - 60 <= 14 + 6 + 2 + 30


def test_what_a_dead_endpoint_had_is_done_by_others_and_it_comes_back(services):
    services[0].fault = "close"
    with fleet(services, copy_after=None) as made:
        answered_once(made, 60)
        dead = next(member for member in made.members if member.url == services[0].url)
        assert dead.health.out and made.counts["failed"] >= 3
        services[0].fault = None
        numbers = itertools.count()
        while not services[0].seeds:  # what it has missed does not keep it out
            assert next(numbers) < 100
            answered_once(made, 30)
        assert services[0].probes >= 1 and not dead.health.out


def test_deaths_at_random_moments_lose_and_double_nothing(services):
    stop = threading.Event()

    def kill() -> None:
        for service in itertools.cycle(services):
            service.fault = "close"
            if stop.wait(0.05):
                return
            service.fault = None

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with fleet(services, limit=8, retries=50) as made:
            answered_once(made, 400)
            assert made.counts["failed"] > 0
    finally:
        stop.set()
        killer.join()


def test_a_straggler_is_copied_and_the_first_answer_ends_the_other(services):
    with fleet(services[:2], limit=4) as made:
        answered_once(made, 40)  # they have a typical time now
        services[0].fault = "hang"
        began = time.monotonic()
        answered_once(made, 8)
        assert time.monotonic() - began < 10  # the timeout is 30
        assert made.counts["copied"] >= 1 and made.counts["overtaken"] >= 1
        deadline = time.monotonic() + 10
        while services[0].hung_up < made.counts["overtaken"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_without_copies_a_straggler_is_waited_for(services):
    with fleet(services[:2], limit=4, copy_after=None) as made:
        answered_once(made, 40)
        services[0].seconds = 0.5
        answered_once(made, 8)
        assert made.counts["sent"] == 48


def test_one_refusal_may_be_the_endpoints_two_are_the_requests(services):
    services[0].fault = 404
    with fleet(services) as made:
        answered_once(made, 30)
        assert made.counts["refused"] >= 1
    for service in services:
        service.fault = 400
    with fleet(services) as made, pytest.raises(Refused, match="status 400: out of order") as caught:
        answered_once(made, 1)
    assert caught.value.url in {service.url for service in services}


def test_the_only_endpoint_refuses_once(services):
    services[0].fault = 400
    with fleet(services[:1]) as made, pytest.raises(Refused):
        answered_once(made, 1)
    assert services[0].requests == 1


def test_a_request_that_fails_everywhere_ends_in_one_line(services):
    for service in services:
        service.fault = 500
    expected = r"^(a request failed 3 times; the last|none of the 3 endpoints answers; the last): .* status 500: out of"
    with fleet(services, retries=2) as made, pytest.raises(Away, match=expected):
        answered_once(made, 20)


def test_a_fleet_without_endpoints_ends_in_one_line(services):
    for service in services:
        service.close()
    expected = r"^none of the 3 endpoints answers; the last: .*[Rr]efused"
    with fleet(services, retries=1) as made, pytest.raises(Away, match=expected):
        answered_once(made, 20)


def test_closing_it_ends_what_is_in_flight(services):
    with fleet(services[:1], limit=8) as made:
        services[0].fault = "hang"
        errors = []

        def listen() -> None:
            try:
                answered_once(made, 30)
            except Away as error:
                errors.append(str(error))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        while services[0].at_once < 8:
            time.sleep(0.005)
        made.close()
        listener.join(20)
        assert errors == ["the engine was closed"]


def test_whoever_stops_listening_causes_no_more_requests(services):
    services[0].seconds = 0.02
    with fleet(services[:1], limit=2) as made:
        answers = made.answers(range(300))
        next(answers)
        answers.close()
        sent = made.counts["sent"]
        time.sleep(0.2)
        assert made.counts["sent"] == sent < 300
        answered_once(made, 4)


def test_endpoints_come_and_go_with_the_file(services, tmp_path):
    file = tmp_path / "fleet"
    file.write_text(services[0].url)
    with fleet(services, addresses=Addresses([], file)) as made:
        answered_once(made, 10)
        file.write_text(services[1].url)
        os.utime(file, ns=(1, 1))
        deadline = time.monotonic() + 20
        while not services[1].seeds:
            assert time.monotonic() < deadline
            answered_once(made, 10)
        before = len(services[0].seeds)
        answered_once(made, 30)
        assert len(services[0].seeds) == before and [member.url for member in made.members] == [services[1].url]
