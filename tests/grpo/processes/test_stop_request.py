"""Signals that wait for the end of a block, or that a block ignores."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from grpo.processes.stop_request import signals_delayed, signals_ignored


class Asked(BaseException):
    """What the handler below raises."""


def _raise(number: int, _: object) -> None:
    raise Asked(signal.Signals(number).name)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, _raise) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_comes_at_the_end_of_the_block(number: signal.Signals) -> None:
    done = []
    with pytest.raises(Asked, match=number.name), signals_delayed():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        done.append("all of it")
    assert done and signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is _raise


def test_a_signal_comes_after_an_error_of_the_block() -> None:
    with pytest.raises(Asked) as asked, signals_delayed():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError
    assert isinstance(asked.value.__context__, ValueError)


def test_without_a_signal_nothing_changes() -> None:
    with signals_delayed():
        pass
    with pytest.raises(Asked, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_delayed_signal_in_a_block_that_ignores_it_is_ignored() -> None:
    with signals_ignored(), signals_delayed():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is _raise


def test_both_signals_within_one_block_raise_once() -> None:
    with pytest.raises(Asked, match="SIGINT"), signals_delayed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is _raise


def test_other_threads_set_no_handler() -> None:
    seen = []

    def look() -> None:
        with signals_delayed(), signals_ignored():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [_raise]
