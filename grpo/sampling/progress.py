"""Progress of a sampling job: the places of its shards, and the counts that it logs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from grpo.config.engines import devices_of
from grpo.config.jobs import SampleJob, SampleTask
from grpo.processes.metrics_log import Metrics
from grpo.sampling.shard import SampledProblem

_LOG_S = 1.0


@dataclass(frozen=True)
class Place:
    """A shard of a task: a range of problems and the file for their samples."""

    task: SampleTask
    start: int
    stop: int
    path: Path

    @property
    def problems(self) -> int:
        return self.stop - self.start


@dataclass
class Window:
    """Counts since the last line of the metrics."""

    samples: int = 0
    tokens: int = 0  # of completions
    prompt_tokens: int = 0  # counted once per completion
    problems: int = 0
    failures: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)  # number of scored completions by source
    right: Counter[str] = field(default_factory=Counter)
    judge: Counter[str] = field(default_factory=Counter)  # see grpo/judging/counts.py


class Progress:
    """Logs a line of metrics every second: problems done, speed, accuracy by source, cost so far.

    It counts shards that other workers have finished, but not those that they have only begun. Any thread may add to
    it.
    """

    def __init__(self, job: SampleJob, places: list[Place], metrics: Metrics | None, workers: int):
        self.places, self.metrics = places, metrics
        self.of = sum(place.problems for place in places)
        self.workers = workers  # processes or actors
        self.devices = workers * max([1, *(devices_of(task.engine) for task in job.tasks)])
        self.window, self.judge = Window(), Counter[str]()
        self.began = self.since = time.perf_counter()
        self.tokens = self.problems = self.logged = 0
        self._lock = threading.Lock()

    def add(self, group: SampledProblem) -> None:
        scored = [b["accuracy"] for b in group.rewards or () if "accuracy" in b]
        self.merge(
            Window(
                samples=len(group.completions),
                tokens=group.tokens,
                prompt_tokens=group.prompt_tokens * len(group.completions),
                problems=int(group.round == 0),
                failures=sum(group.failures["kinds"].values()),
                verdicts=Counter({group.source: len(scored)}),
                right=Counter({group.source: group.right}),
            )
        )

    def merge(self, more: Window) -> None:
        with self._lock:
            self._merge(more)

    def _merge(self, more: Window) -> None:
        for name, value in vars(more).items():
            setattr(self.window, name, getattr(self.window, name) + value)
        self.tokens += more.tokens + more.prompt_tokens
        self.problems += more.problems
        self.judge += more.judge
        if time.perf_counter() - self.since > _LOG_S:
            self.log()

    @property
    def engine_s(self) -> float:
        return (time.perf_counter() - self.began) * self.devices

    def log(self, last: bool = False) -> None:
        """Logs the counts since the last line. Only the `last` line has the last step: shards may be finished whose
        counts have not arrived."""
        now, window = time.perf_counter(), self.window
        finished = sum(place.problems for place in self.places if place.path.exists())
        step = min(self.of if last else self.of - 1, max(self.logged + 1, finished, self.problems))
        if self.metrics is None or step == self.logged or not (window.samples or (last and self.logged)):
            return
        seconds = now - self.since
        right = {f"accuracy_{source}": window.right[source] / n for source, n in sorted(window.verdicts.items()) if n}
        if scored := window.verdicts.total():
            right = {"accuracy": window.right.total() / scored} | (right if len(right) > 1 else {})
        self.metrics.log(
            step,
            self.of,
            samples=window.samples,
            completion_tokens=window.tokens / max(1, window.samples),
            tokens_per_s=window.tokens / seconds,
            samples_per_s=window.samples / seconds,
            reward_failures=window.failures,
            tokens_so_far=self.tokens,
            device_hours=self.engine_s / 3600,
            **right,
        )
        self.logged, self.window, self.since = step, Window(), now
