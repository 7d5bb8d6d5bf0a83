"""Health of an endpoint, with a clock that the test sets."""

from __future__ import annotations

from grpo.http.fleet.health import EndpointHealth


def test_three_failures_in_a_row_take_it_out_until_a_probe():
    health = EndpointHealth()
    assert [health.failed(sent=0, now=1) for _ in range(3)] == [False, False, True]
    assert not health.is_up(1) and not health.needs_probe(1)
    assert not health.is_up(2) and health.needs_probe(2)  # the first pause is at most half a second
    health.probed(True, now=2)
    assert health.is_up(2)


def test_an_answer_between_failures_keeps_it_up():
    health = EndpointHealth()
    for _ in range(2):
        health.failed(sent=0, now=1)
        health.failed(sent=0, now=1)
        health.answered()
    assert health.is_up(1)


def test_pauses_double_up_to_half_a_minute_until_an_answer():
    health, now = EndpointHealth(), 0.0
    for _ in range(3):
        health.failed(sent=now, now=now)
    pauses = []
    for _ in range(9):
        began = now
        while not health.needs_probe(now):
            now += 0.01
        pauses.append(now - began)
        health.probed(False, now)
    for pause, longest in zip(pauses, (0.5, 1, 2, 4, 8, 16, 30, 30, 30), strict=True):
        assert longest / 2 <= pause <= longest + 0.02
    assert health.pauses == 10
    health.answered()
    assert health.pauses == 0 and health.is_up(now)


def test_after_a_good_probe_one_failure_is_enough():
    health = EndpointHealth()
    for _ in range(3):
        health.failed(sent=0, now=0)
    health.probed(True, now=1)
    assert health.failed(sent=1, now=2)
    assert health.pauses == 2


def test_what_was_sent_before_the_outage_counts_only_once():
    """64 requests in flight when it dies: three failures are one outage, and so are 61 more."""
    health = EndpointHealth()
    assert [health.failed(sent=0, now=1) for _ in range(64)].count(True) == 1
    health.probed(True, now=2)
    assert not health.failed(sent=0, now=3)  # a timeout of that time
    assert health.is_up(3) and health.pauses == 1


def test_it_pauses_as_long_as_it_asks_and_needs_no_probe():
    health = EndpointHealth()
    assert health.refused_load(sent=0, now=10, wait_s=5)
    assert not health.refused_load(sent=0, now=10.1, wait_s=5)
    assert not health.is_up(14.9) and not health.needs_probe(14.9) and health.is_up(15)
