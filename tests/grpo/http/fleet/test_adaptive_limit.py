"""Requests in flight that an endpoint takes: up by one a window, down by half."""

from __future__ import annotations

from grpo.http.fleet.adaptive_limit import AdaptiveLimit


def test_it_begins_at_the_maximum_and_halves_once_for_all_in_flight():
    limit = AdaptiveLimit(64)
    for _ in range(64):
        limit.overloaded(sent=0, now=1)
    assert limit.requests == 32
    limit.overloaded(sent=2, now=3)
    assert limit.requests == 16


def test_it_never_falls_below_one():
    limit = AdaptiveLimit(2)
    for now in range(10):
        limit.overloaded(sent=now, now=now)
    assert limit.requests == 1


def test_a_window_of_answers_adds_one_up_to_the_maximum():
    limit = AdaptiveLimit(8)
    limit.overloaded(sent=0, now=0)
    assert limit.requests == 4
    for _ in range(5):  # 4 answers give 4 + 1/4 + 1/4.25 + ..., just below 5
        limit.answered(in_flight=4)
    assert limit.requests == 5
    for _ in range(100):
        limit.answered(in_flight=limit.requests)
    assert limit.requests == 8


def test_an_endpoint_that_is_not_full_gets_no_more():
    limit = AdaptiveLimit(8)
    limit.overloaded(sent=0, now=0)
    for _ in range(100):
        limit.answered(in_flight=3)
    assert limit.requests == 4
