"""A pool of processes that can be killed: rewards are computed in them, off the main thread and in time.

A verifier may hang in C code, fill the memory or crash. None of that may cost more than its own item, so each
worker has one item in flight, and a worker that oversteps is killed with everything it started and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from grpo.processes.pool_worker import CLEANUP_S, AnswerFailure, receive, send
from grpo.processes.slots import Place

__all__ = ["AnswerFailure", "Failure", "Pool"]

START_LIMIT_S = 120.0
"""How long a worker may take to start and to import what it is to run; none of it counts against an item."""
_BOOTSTRAP = "import sys; sys.path.insert(0, {root!r}); from grpo.processes.pool_worker import main; main()"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Failure:
    """An item that came to no value.

    `kind` is "timeout", "crash", "error" or what an `AnswerFailure` says; `message` is one line. `of_answer`: the
    answer misbehaved, which a sandbox saw; otherwise the verifier failed, and nothing is known of the answer.
    """

    kind: str
    message: str
    of_answer: bool


SLOW_S = 0.05
"""An item that takes longer leaves its place to another: most verifiers that take this long wait for something."""


class Pool:
    """`workers` processes, each with `memory_bytes` of address space, that give an item `time_limit_s` seconds.

    Beside slow items up to `workers` more processes start, so that what waits does not hold up what computes.
    `prepare`, a module-level function, runs once in each new worker before its first item: what it imports counts
    against nobody's time. Any thread may submit. Items are started in the order in which they were submitted.
    """

    def __init__(
        self,
        workers: int,
        time_limit_s: float,
        memory_bytes: int | None,
        prepare: Callable[[], object] | None = None,
    ):
        if workers < 1 or time_limit_s <= 0:
            raise InputError(f"a pool needs workers and time: got {workers} workers, {time_limit_s} s")
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._make_worker = functools.partial(_Worker, time_limit_s, memory_bytes, prepare)
        self._most = 2 * workers
        self._places = threading.Semaphore(workers)  # to begin an item takes one
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        for _ in range(workers):
            self._add(spare=False)
        atexit.register(self.close)

    def _add(self, spare: bool) -> None:
        worker = self._make_worker()
        thread = threading.Thread(target=self._serve, args=(worker, spare), daemon=True)
        self._workers.append(worker)
        self._threads.append(thread)
        thread.start()

    def _help(self) -> None:
        """Another process beside a slow item, while there may be one more."""
        with self._lock:
            if not self._closed and len(self._workers) < self._most and not self._items.empty():
                self._add(spare=True)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """The future of ``function(*args, **kwargs)``, or of a `Failure`.

        It raises only what is the user's mistake (InputError), and RuntimeError when no worker can be started.
        """
        name = _by_reference(function)
        item = _Item(name, pickle.dumps((function, args, kwargs)), Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._items.put(item)
        return item.future

    def close(self) -> None:
        """Kills the workers and waits until they are gone; what was not finished is cancelled."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self._items.get_nowait()) is not None:
                    item.future.cancel()
        for _ in self._threads:
            self._items.put(None)
        for worker in self._workers:
            worker.interrupt()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, worker: _Worker, spare: bool) -> None:
        # One thread a worker: the kernel ends a worker when the thread that started it ends.
        place = Place(self._places, self._help)
        try:
            worker.start()
            if spare:
                worker.get_ready()  # before it takes a place from another
            while True:
                place.take()
                item = self._items.get()
                if item is None:
                    break
                if not item.future.set_running_or_notify_cancel():
                    continue
                try:
                    value = worker.run(item, place.leave)
                except BaseException as error:
                    item.future.set_exception(error)
                else:
                    item.future.set_result(value)
                worker.start()
        finally:
            place.leave()
            worker.kill()


@dataclass(frozen=True)
class _Item:
    function: bytes
    payload: bytes
    future: Future[Any]


def _by_reference(function: Callable[..., Any]) -> bytes:
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(f"{function!r} is defined in the script itself, where a worker cannot import it from")
    return pickle.dumps(function)


class _Worker:
    """One worker process after another. All but `interrupt` is for the thread that owns it."""

    def __init__(self, time_limit_s: float, memory_bytes: int | None, prepare: Callable[[], object] | None):
        self._limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._prepare = _by_reference(prepare) if prepare else None
        self._lock = threading.Lock()
        self._interrupted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._known: set[bytes] = set()

    def start(self) -> None:
        """Sees to it that there is a process, and does not wait until it is ready."""
        with contextlib.suppress(OSError):  # no room for a process now: `run` tries again, and says so
            if self._process is None and not self._interrupted:
                self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with self._lock:
            self._connection = ours
            if self._interrupted:
                ours.shutdown(socket.SHUT_RDWR)
        bootstrap = _BOOTSTRAP.format(root=str(Path(__file__).parents[2]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", bootstrap, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,  # never written to: it ends when this process does
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **_ONE_THREAD},
            )
        finally:
            theirs.close()
        self._ready = False
        self._known.clear()

    def get_ready(self) -> None:
        """Waits until the process is ready; what is wrong with it, `run` says."""
        with contextlib.suppress(Exception):
            self._started()

    def run(self, item: _Item, slow: Callable[[], None]) -> Any:
        """The function's value or a `Failure`; `slow` is called if it takes longer than SLOW_S. RuntimeError if no
        process can be started."""
        starting = True
        try:
            connection = self._started()
            starting = item.function not in self._known
            deadline = time.monotonic() + (START_LIMIT_S if starting else self._limit_s)
            send(connection, bytes([starting]) + item.payload, deadline)
            reply = self._reply(connection, deadline, lambda: None if starting else slow())
            if starting and not reply:  # what it needs is imported, and its time begins
                starting = False
                self._known.add(item.function)
                deadline = time.monotonic() + self._limit_s
                reply = self._reply(connection, deadline, slow)
            return self._value(reply)
        except TimeoutError:
            self.kill()
            if starting:
                raise RuntimeError(f"a scoring worker was not ready within {START_LIMIT_S:g} s") from None
            return Failure("timeout", f"no result within {self._limit_s:g} s", False)
        except (EOFError, ConnectionError):
            if self._interrupted:
                raise CancelledError from None
            how = self.kill(ended=True)
            if starting:
                raise RuntimeError(f"a scoring worker ended while it started: {how}") from None
            return Failure("crash", f"the worker process ended: {how}", False)

    def _reply(self, connection: socket.socket, deadline: float, slow: Callable[[], None]) -> bytes:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000 * SLOW_S):
            slow()
        return receive(connection, deadline)

    def _started(self) -> socket.socket:
        if self._process is None:
            self._launch()
        assert self._connection is not None
        if not self._ready:
            deadline = time.monotonic() + START_LIMIT_S
            send(self._connection, pickle.dumps((sys.path, self._memory_bytes, self._prepare)), deadline)
            prepared = self._value(receive(self._connection, deadline))
            if isinstance(prepared, Failure):
                raise RuntimeError(f"a scoring worker could not start: {prepared.message}")
            self._ready = True
        return self._connection

    def _value(self, reply: bytes) -> Any:
        try:
            kind, *content = pickle.loads(reply)
        except Exception as error:
            return Failure("error", f"the result cannot be read: {type(error).__name__}", False)
        if kind == "value":
            return content[0]
        if kind == "input":
            raise InputError(content[0])
        *failure, spent = content
        if spent:
            self.kill()
        return Failure(*failure)

    def kill(self, ended: bool = False) -> str:
        """No process is left, nor anything it started. How it ended, if it `ended` by itself."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        if process is None:
            return ""
        assert process.stdin is not None
        process.stdin.close()
        if not ended:
            process.terminate()  # should another process hold the pipe's other end open
        try:
            code = process.wait(CLEANUP_S + 5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return f"signal {signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"

    def interrupt(self) -> None:
        """From any thread: what runs ends now, and nothing more will run."""
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # already closed
                    self._connection.shutdown(socket.SHUT_RDWR)
