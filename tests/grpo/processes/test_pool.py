"""A pool of killable processes: an item that misbehaves costs itself, and nobody is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from grpo.processes.lifetime import descendants
from grpo.processes.pool import AnswerFailure, Failure, Pool

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
PATIENCE_S = 60.0
"""Long enough for a busy machine; nothing waits it out unless it fails."""


@pytest.fixture
def pool():
    with Pool(1, 60.0, 2 * GIB) as pool:
        yield pool


def outcome(future: Future[Any]) -> Any:
    return future.result(timeout=PATIENCE_S)


def wait_until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running_with(word: str) -> set[int]:
    """Processes, zombies aside, with `word` in their command line or environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and word.encode() in (
                (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            ):
                found.add(int(entry.name))
    return found


def hang(*_: object) -> None:
    while True:
        pass


def hang_in_c() -> int:
    return sum(map(int.bit_length, iter(lambda: 1, 2)))  # type: ignore[arg-type]


def segfault() -> None:
    ctypes.string_at(0)


def eat() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


def be_mistaken() -> None:
    raise InputError("problem 7: unknown verifier 'nubmer'")


def blame_the_answer() -> None:
    raise AnswerFailure("code_timeout", "ran for more than 2 s\nof wall time")


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError


def raise_unreadable() -> None:
    raise Unreadable


def give_a_lock() -> Any:
    return threading.Lock()


class Explosive:
    """Packs well and cannot be unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.truediv, (1, 0)


def print_a_lot() -> str:
    print("noise" * 100_000)
    os.write(1, b"\0" * 100_000)
    return "result"


def wait_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return "saw it"


def write_later(path: str, text: str) -> None:
    Path(path).write_text(text)


def leave_a_daemon(marker: str) -> None:
    """A process in a session of its own, two forks away, and then the worker hangs."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sh", ["sh", "-c", f": {marker}; trap '' TERM HUP; while :; do sleep 1; done"])
        os._exit(0)
    hang()


def facts() -> dict[str, Any]:
    return {"torch": "torch" in sys.modules, "threads": os.environ["OMP_NUM_THREADS"], "stdin": os.read(0, 1)}


PREPARED: list[int] = []


def prepare() -> None:
    PREPARED.append(os.getpid())


def fail_to_prepare() -> None:
    raise RuntimeError("no such library")


def kill_the_supervisor() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def prepared() -> tuple[list[int], int]:
    return PREPARED, os.getpid()


def test_results_come_with_the_item_they_belong_to() -> None:
    with Pool(3, 60.0, None) as pool:
        futures = [pool.submit(operator.mul, i, i) for i in range(2_000)]
        assert [outcome(f) for f in futures] == [i * i for i in range(2_000)]


def test_keyword_arguments_reach_the_function(pool: Pool) -> None:
    assert outcome(pool.submit(int, "ff", base=16)) == 255


@pytest.mark.parametrize("function", [hang, hang_in_c])
def test_an_item_over_its_time_is_killed_and_the_next_one_runs(function: Any) -> None:
    with Pool(1, 0.3, None) as pool:
        late, next_ = pool.submit(function), pool.submit(abs, -3)
        assert outcome(late) == Failure("timeout", "no result within 0.3 s", False)
        assert outcome(next_) == 3


def test_an_item_may_have_more_time_than_the_others_and_not_less() -> None:
    with Pool(1, 0.5, None) as pool:
        assert outcome(pool.submit_within(60.0, time.sleep, 1.0)) is None
        assert outcome(pool.submit_within(0.1, time.sleep, 0.2)) is None
        assert outcome(pool.submit_within(1.0, hang)) == Failure("timeout", "no result within 1 s", False)


def compute(seconds: float) -> bool:
    """Takes so many seconds of a processor."""
    while time.process_time() < seconds:
        pass
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a process waited")
def test_waiting_for_a_processor_does_not_count_against_the_item() -> None:
    """0.5 s of a processor that five others use too take some 3 s; 1 s is allowed."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
    try:
        with Pool(1, 1.0, 2 * GIB) as pool:
            assert outcome(pool.submit(operator.add, 1, 2)) == 3
            assert outcome(pool.submit(compute, outcome(pool.submit(time.process_time)) + 0.5)) is True
            assert isinstance(outcome(pool.submit(time.sleep, 100)), Failure)  # who sleeps does not wait
    finally:
        os.sched_setaffinity(0, processors)
        for process in busy:
            process.kill()
            process.wait()


def test_what_a_worker_imports_does_not_count_against_the_item(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.7)\ndef answer(): return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_to_import  # type: ignore[import-not-found]

    with Pool(1, 0.4, None) as pool:
        assert outcome(pool.submit(slow_to_import.answer)) == 42


def test_a_worker_that_dies_costs_its_item_alone(pool: Pool) -> None:
    futures = [pool.submit(os._exit, 3), pool.submit(abs, -1), pool.submit(segfault), pool.submit(abs, -2)]
    exited, one, crashed, two = map(outcome, futures)
    assert exited == Failure("crash", "the worker process ended: exit code 3", False)
    # No signal has the number 255 - 128.
    assert outcome(pool.submit(os._exit, 255)) == Failure("crash", "the worker process ended: exit code 255", False)
    assert crashed == Failure("crash", "the worker process ended: signal SIGSEGV", False)
    assert (one, two) == (1, 2)


def test_memory_is_limited_and_a_worker_that_filled_it_is_not_used_again(pool: Pool) -> None:
    first = outcome(pool.submit(os.getpid))
    assert outcome(pool.submit(eat)) == Failure("error", "MemoryError: ", False)
    assert outcome(pool.submit(os.getpid)) != first


def test_an_exception_is_a_failure_of_the_verifier_in_one_line(pool: Pool) -> None:
    assert outcome(pool.submit(operator.truediv, 1, 0)) == Failure(
        "error", "ZeroDivisionError: division by zero", False
    )
    assert outcome(pool.submit(sys.exit, "enough\nof this")) == Failure("error", "SystemExit: enough of this", False)
    assert outcome(pool.submit(raise_unreadable)).message == "Unreadable: its message cannot be read"


def test_an_answer_that_misbehaved_is_told_from_a_verifier_that_failed(pool: Pool) -> None:
    assert outcome(pool.submit(blame_the_answer)) == Failure("code_timeout", "ran for more than 2 s of wall time", True)


def test_the_users_mistake_is_raised(pool: Pool) -> None:
    with pytest.raises(InputError, match="problem 7: unknown verifier 'nubmer'"):
        outcome(pool.submit(be_mistaken))


@pytest.mark.parametrize(("function", "words"), [(give_a_lock, "cannot be sent"), (Explosive, "cannot be read")])
def test_a_result_that_cannot_travel_is_a_failure(pool: Pool, function: Any, words: str) -> None:
    failure = outcome(pool.submit(function))
    assert failure.kind == "error" and words in failure.message
    assert outcome(pool.submit(abs, -1)) == 1


def test_what_cannot_be_sent_to_a_worker_is_refused_when_it_is_submitted(pool: Pool) -> None:
    with pytest.raises(Exception, match="pickle|local object"):
        pool.submit(lambda: 1)
    with pytest.raises(TypeError, match="pickle"):
        pool.submit(abs, threading.Lock())
    assert outcome(pool.submit(abs, -1)) == 1


def test_what_a_worker_prints_does_not_disturb_its_result(pool: Pool) -> None:
    assert outcome(pool.submit(print_a_lot)) == "result"


def test_a_large_item_and_a_large_result_pass(pool: Pool) -> None:
    data = os.urandom(20 << 20)
    assert outcome(pool.submit(operator.add, data, b"!")) == data + b"!"


def test_workers_do_not_load_torch_and_keep_to_one_thread(pool: Pool) -> None:
    assert outcome(pool.submit(facts)) == {"torch": False, "threads": "1", "stdin": b""}


def test_a_slow_item_holds_no_other_back(tmp_path) -> None:
    """The first item ends only when the last one has: with items bound to workers in advance it never would."""
    sign = tmp_path / "done"
    with Pool(2, 60.0, None) as pool:
        slow = pool.submit(wait_for, str(sign))
        others = [pool.submit(abs, -i) for i in range(100)]
        last = pool.submit(write_later, str(sign), "")
        assert [outcome(f) for f in [*others, last]] == [*range(100), None]
        assert outcome(slow) == "saw it"


def test_many_threads_may_submit(pool: Pool) -> None:
    sums: list[int] = []
    threads = [
        threading.Thread(target=lambda: sums.append(sum(outcome(pool.submit(abs, -i)) for i in range(50))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sums == [1225] * 4  # 0 + 1 + ... + 49


def test_each_worker_prepares_itself_once() -> None:
    with Pool(1, 60.0, None, prepare) as pool:
        outcome(pool.submit(abs, -1))
        assert outcome(pool.submit(os._exit, 0)).kind == "crash"
        prepared_by, worker = outcome(pool.submit(prepared))
        assert prepared_by == [worker]


def test_workers_that_cannot_start_stop_the_run() -> None:
    with Pool(1, 60.0, None, fail_to_prepare) as pool, pytest.raises(RuntimeError, match="no such library"):
        outcome(pool.submit(abs, -1))
    with Pool(1, 60.0, GIB, eat) as pool, pytest.raises(RuntimeError, match="could not start: MemoryError"):
        outcome(pool.submit(abs, -1))
    for end, name in ((os.abort, "SIGABRT"), (kill_the_supervisor, "SIGKILL")):
        with Pool(1, 60.0, None, end) as pool, pytest.raises(RuntimeError, match=f"while it started: signal {name}"):
            outcome(pool.submit(abs, -1))


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(InputError, match="0 workers"):
        Pool(0, 1.0, None)


def test_close_ends_what_runs_cancels_what_waits_and_leaves_no_process() -> None:
    others = descendants(os.getpid())  # of tests before this one
    pool = Pool(2, 60.0, None)
    futures = [pool.submit(hang, i) for i in range(4)]
    wait_until(lambda: sum(f.running() for f in futures) == 2)
    wait_until(lambda: len(descendants(os.getpid()) - others) >= 4)  # two supervisors, two workers
    before = descendants(os.getpid()) - others
    pool.close()
    assert not before & descendants(os.getpid())
    for future in futures:
        with pytest.raises(CancelledError):
            outcome(future)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(abs, 1)
    pool.close()


def test_a_killed_worker_takes_its_daemons_along(tmp_path) -> None:
    marker = f"daemon-{tmp_path}"
    with Pool(1, 1.0, None) as pool:
        assert outcome(pool.submit(leave_a_daemon, marker)).kind == "timeout"
        assert not running_with(marker)


OWNER = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from grpo.processes.pool import Pool
from tests.grpo.processes.test_pool import leave_a_daemon
pool = Pool(2, 1000.0, None, environment=["POOL_TEST"])
pool.submit(leave_a_daemon, {marker!r})
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["time.sleep(1000)", "print(flush=True); sys.stdin.read(); sys.exit()"],
    ids=["killed", "ends without closing"],
)
def test_no_worker_outlives_the_process_of_the_pool(tmp_path, then: str) -> None:
    marker = f"orphan-{tmp_path}"
    code = OWNER.format(root=str(ROOT), marker=marker, then=then)
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "POOL_TEST": marker},
    )
    # The owner, two supervisors, two workers and the daemon with its sleep.
    wait_until(lambda: len(running_with(marker)) >= 6)
    if "1000" in then:
        owner.kill()
    owner.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not running_with(marker))


def test_control_c_reaches_the_owner_alone(tmp_path) -> None:
    code = (
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from grpo.processes.pool import Pool\n"
        "pool = Pool(1, 60.0, None)\n"
        "pool.submit(abs, -1).result()\n"
        "slow = pool.submit(time.sleep, 0.5)\n"
        "try:\n"
        "    os.killpg(0, signal.SIGINT); time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    print(slow.result(), pool.submit(abs, -7).result())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("None 7\n", "")


def test_waiting_items_do_not_hold_up_the_others(tmp_path):
    """One worker, and an item that waits for what a later one does: a process beside it takes the later one."""
    path = str(tmp_path / "done")
    with Pool(1, 60.0, None) as pool:
        waiting = pool.submit(wait_for, path)
        writing = pool.submit(write_later, path, "x")
        assert writing.result(timeout=60) is None
        assert waiting.result(timeout=60) == "saw it"


def test_workers_have_named_variables_only(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("MY_SERVICE", "http://here")
    with Pool(1, 60.0, None, environment=["MY_SERVICE"]) as pool:
        assert outcome(pool.submit(os.getenv, "SOME_API_KEY")) is None
        assert outcome(pool.submit(os.getenv, "MY_SERVICE")) == "http://here"
        assert outcome(pool.submit(os.getenv, "PATH")) == os.environ["PATH"]
