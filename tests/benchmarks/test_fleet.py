"""Figures of the fleet's benchmark, from logs that can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.fleet import figures
from benchmarks.fleet_simulator import TOKENS_MAX, tokens_of


def endpoint(tokens: int, *log: tuple[float, int, bool]) -> dict:
    return {"slots": 2, "rate": 10.0, "done_tokens": tokens, "refused": 0, "failed": 0, "log": [(0.0, 0, True), *log]}


def test_two_endpoints_of_which_one_ends_first():
    """From 1 to 6: both have work in 3 of the 5 seconds, and the second has none in the last 2."""
    first = endpoint(30, (1.0, 1, True), (2.0, 2, True), (5.0, 1, True), (6.0, 0, True))
    second = endpoint(20, (1.0, 1, True), (4.0, 0, True))
    found = figures([first, second])
    assert (found["seconds"], found["tail_s"], found["possible"], found["made"]) == (5, 2, 100, 50)
    assert found["busy"] == pytest.approx(3 / 5)
    assert found["slots_used"] == pytest.approx((1 + 3 * 2 + 1 + 3) / 20)


def test_an_endpoint_that_is_down_is_not_expected_to_work():
    """The second dies at 3: from there on it counts neither as idle nor in what was possible."""
    first = endpoint(50, (1.0, 2, True), (6.0, 0, True))
    second = endpoint(0, (1.0, 1, True), (3.0, 0, False))
    found = figures([first, second])
    assert (found["busy"], found["tail_s"], found["possible"]) == (1.0, 0, 5 * 10 + 2 * 10)


def test_a_length_follows_from_the_seed():
    lengths = [tokens_of(seed) for seed in range(1000)]
    assert lengths == [tokens_of(seed) for seed in range(1000)]
    assert 700 < sorted(lengths)[500] < 900 and max(lengths) <= TOKENS_MAX
