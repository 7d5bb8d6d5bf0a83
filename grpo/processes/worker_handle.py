"""The pool's side of one worker: starts its process, sends it items, reads the results, and kills it."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from grpo.other_environments import FOUND_IN
from grpo.processes.pool_worker import CLEANUP_S, receive, send

START_LIMIT_S = 120.0
"""Seconds that a worker may take to start and to import what it runs; this does not count towards an item's time."""
SLOW_S = 0.05
"""Seconds after which an item gives up its slot: most verifiers that take this long are waiting for something."""
STARVED_MAX_S = 120.0
"""Maximum seconds by which an item's limit is extended for the time that its worker waited for a processor."""
_BOOTSTRAP = "import sys; sys.path.insert(0, {root!r}); from grpo.processes.pool_worker import main; main()"
ENVIRONMENT = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "XDG_CACHE_HOME"),
    *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "NUMBA_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "R1FLOW_HOME"),
    *("HF_HOME", "HF_HUB_OFFLINE"),
}
"""The only variables that a worker inherits: it handles model output, and the environment contains keys."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Failure:
    """Result of an item whose function returned no value.

    `kind` is "timeout", "crash", "error" or the kind of an `AnswerFailure`; `message` is one line. `of_answer`: a
    sandbox saw the answer misbehave; otherwise the verifier failed, which says nothing about the answer.
    """

    kind: str
    message: str
    of_answer: bool


@dataclass(frozen=True)
class Item:
    """One call to make: the pickled function, the pickled call, the future of its result, and the seconds it may take
    if they are more than the pool's limit."""

    function: bytes
    payload: bytes
    future: Future[Any]
    limit_s: float = 0.0


def pickle_by_reference(function: Callable[..., Any]) -> bytes:
    """Pickles a module-level function. Raises ValueError for one in the main script, which a worker cannot import."""
    if getattr(function, "__module__", None) == "__main__":
        raise ValueError(f"{function!r} is defined in the script itself, where a worker cannot import it from")
    return pickle.dumps(function)


class WorkerHandle:
    """Runs one worker process after another. Only `interrupt` may be called from threads other than the owner's."""

    def __init__(
        self,
        time_limit_s: float,
        memory_bytes: int | None,
        prepare: Callable[[], object] | None,
        environment: Collection[str] = (),
    ):
        self._environment = ENVIRONMENT | set(environment)
        self._limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._prepare = pickle_by_reference(prepare) if prepare else None
        self._lock = threading.Lock()
        self._interrupted = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._imported: set[bytes] = set()  # functions that this process has loaded

    def start(self) -> None:
        """Starts a process if there is none, without waiting until it is ready."""
        with contextlib.suppress(OSError):  # no process can be started now: `run` tries again and reports it
            if self._process is None and not self._interrupted:
                self._launch()

    def _launch(self) -> None:
        own_end, worker_end = socket.socketpair()
        with self._lock:
            self._connection = own_end
            if self._interrupted:
                own_end.shutdown(socket.SHUT_RDWR)
        bootstrap = _BOOTSTRAP.format(root=FOUND_IN)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", bootstrap, str(worker_end.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                pass_fds=[worker_end.fileno()],
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k in self._environment} | _ONE_THREAD,
            )
        finally:
            worker_end.close()
        self._ready = False
        self._imported.clear()

    def wait_until_ready(self) -> None:
        """Waits until the process is ready. Errors are reported by `run`."""
        with contextlib.suppress(Exception):
            self._started()

    def run(self, item: Item, on_slow: Callable[[], None]) -> Any:
        """Returns the function's value or a `Failure`. Calls `on_slow` if it takes longer than SLOW_S.

        Raises RuntimeError if no process can be started.
        """
        starting, limit_s = True, max(self._limit_s, item.limit_s)
        try:
            connection = self._started()
            starting = item.function not in self._imported
            deadline = time.monotonic() + (START_LIMIT_S if starting else limit_s)
            send(connection, bytes([starting]) + item.payload, deadline)
            reply = self._reply(connection, deadline, lambda: None if starting else on_slow())
            if starting and not reply:  # the function is imported, and its time starts
                starting = False
                self._imported.add(item.function)
                deadline = time.monotonic() + limit_s
                reply = self._reply(connection, deadline, on_slow)
            return self._value(reply)
        except TimeoutError:
            self.kill()
            if starting:
                raise RuntimeError(f"a scoring worker was not ready within {START_LIMIT_S:g} s") from None
            return Failure("timeout", f"no result within {limit_s:g} s", False)
        except (EOFError, ConnectionError):
            if self._interrupted:
                raise CancelledError from None
            cause = self.kill(ended=True)
            if starting:
                raise RuntimeError(f"a scoring worker ended while it started: {cause}") from None
            return Failure("crash", f"the worker process ended: {cause}", False)

    def _reply(self, connection: socket.socket, deadline: float, on_slow: Callable[[], None]) -> bytes:
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if poll.poll(1000 * SLOW_S):
            return receive(connection, deadline)
        on_slow()
        latest, waited = deadline, self._waited_for_processor()
        while not poll.poll(1000 * max(0.0, latest - time.monotonic())):
            # Otherwise the time limit, and so the rewards, would depend on what else runs on the machine.
            later = deadline + min(self._waited_for_processor() - waited, STARVED_MAX_S)
            if later <= max(latest, time.monotonic()):
                break
            latest = later
        return receive(connection, latest)

    def _waited_for_processor(self) -> float:
        """Seconds for which the worker was ready to run but all processors were busy; 0 if Linux does not report it.
        Measured for the supervisor's only child, which does the work."""
        try:
            assert self._process is not None
            pid = self._process.pid
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(Path(f"/proc/{child}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, LookupError):
            return 0.0

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
        *failure, exhausted = content
        if exhausted:
            self.kill()
        return Failure(*failure)

    def kill(self, ended: bool = False) -> str:
        """Kills the process and everything it started, or reaps one that has `ended`. Returns how it ended."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        if process is None:
            return ""
        assert process.stdin is not None
        process.stdin.close()
        if not ended:
            process.terminate()  # in case another process keeps the pipe's other end open
        try:
            code = process.wait(CLEANUP_S + 5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        try:
            return f"signal {signal.Signals(-code if code < 0 else code - 128).name}"  # of the supervisor, or its child
        except ValueError:
            return f"exit code {code}"

    def interrupt(self) -> None:
        """Ends the running item and prevents further ones. May be called from any thread."""
        with self._lock:
            self._interrupted = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # already closed
                    self._connection.shutdown(socket.SHUT_RDWR)
