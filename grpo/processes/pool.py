"""A pool of killable processes in which rewards are computed, off the main thread and with a time limit.

A verifier may hang in C code, fill the memory or crash. This must affect only its own item. So each worker has one item
in flight, and a worker that breaks a limit is killed with everything it started and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import pickle
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from grpo.errors import InputError
from grpo.processes.pool_worker import AnswerFailure
from grpo.processes.slots import Slot
from grpo.processes.worker_handle import Failure, Item, WorkerHandle, pickle_by_reference

__all__ = ["AnswerFailure", "Failure", "Pool"]


class Pool:
    """Runs functions in `workers` processes with `memory_bytes` of address space each, and `time_limit_s` seconds per
    item.

    If items are slow, up to `workers` additional processes start, so that items that wait do not block items that
    compute. `prepare`, a module-level function, runs once in each new worker before its first item, so that its imports
    do not count towards an item's time. `environment`: variables that workers get in addition to the few that every
    program needs. Any thread may submit. Items start in the order of submission.
    """

    def __init__(
        self,
        workers: int,
        time_limit_s: float,
        memory_bytes: int | None,
        prepare: Callable[[], object] | None = None,
        environment: Collection[str] = (),
    ):
        if workers < 1 or time_limit_s <= 0:
            raise InputError(f"a pool needs workers and time: got {workers} workers, {time_limit_s} s")
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._make_worker = functools.partial(WorkerHandle, time_limit_s, memory_bytes, prepare, environment)
        self._max_workers = 2 * workers
        self._slots = threading.Semaphore(workers)
        self._workers: list[WorkerHandle] = []
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

    def _add_spare(self) -> None:
        """Starts an additional worker because of a slow item, if items are waiting and the limit allows it."""
        with self._lock:
            if not self._closed and len(self._workers) < self._max_workers and not self._items.empty():
                self._add(spare=True)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a future whose result is ``function(*args, **kwargs)`` or a `Failure`.

        The future raises InputError for user errors, and RuntimeError if no worker can be started.
        """
        return self.submit_within(0.0, function, *args, **kwargs)

    def submit_within(self, limit_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Like `submit`, for an item that may take `limit_s` seconds if that is more than the pool's limit."""
        name = pickle_by_reference(function)
        item = Item(name, pickle.dumps((function, args, kwargs)), Future(), limit_s)
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._items.put(item)
        return item.future

    def close(self) -> None:
        """Kills the workers and waits until they are gone. Cancels items that have not finished."""
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

    def _serve(self, worker: WorkerHandle, spare: bool) -> None:
        # One thread per worker: the kernel ends a worker when the thread that started it ends.
        slot = Slot(self._slots, self._add_spare)
        try:
            worker.start()
            if spare:
                worker.wait_until_ready()  # before it takes a slot from another worker
            while True:
                slot.acquire()
                item = self._items.get()
                if item is None:
                    break
                if not item.future.set_running_or_notify_cancel():
                    continue
                try:
                    value = worker.run(item, slot.release)
                except BaseException as error:
                    item.future.set_exception(error)
                else:
                    item.future.set_result(value)
                worker.start()
        finally:
            slot.release()
            worker.kill()
