"""Progress of a sampling job: the places of its shards, and the counts that it logs."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo.config.engines import devices_of
from grpo.config.jobs import SampleJob, SampleTask
from grpo.processes.metrics_log import Metrics, replace_text
from grpo.sampling.shard import Earlier, SampledProblem

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
    spent: int = 0  # tokens of completions and prompts, a prompt's once per completion
    problems: int = 0
    failures: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)  # number of scored completions by source
    right: Counter[str] = field(default_factory=Counter)
    judge: Counter[str] = field(default_factory=Counter)  # see grpo/judging/counts.py


@dataclass
class Spent:
    """What attempts of a job spent in one process, and its judge's counts."""

    engine_s: float = 0.0
    tokens: int = 0
    judge: Counter[str] = field(default_factory=Counter)


def _read(path: Path | None) -> Spent:
    """Nothing if there is no such file, or if it is damaged: only metrics depend on it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads(path.read_text()) if path else {}
        return Spent(values["engine_s"], values["tokens"], Counter(values["judge"]))
    return Spent()


def spent_file(state: Path, rank: int) -> Path:
    """The file of a process for what it and its predecessors spent."""
    return state / f"spent-{rank}.json"


def judged(state: Path) -> dict[str, int]:
    """What the judges of all processes and attempts did."""
    counts = Counter[str]()
    for path in state.glob("spent-*.json"):
        counts.update(_read(path).judge)  # a sum of counters would drop what one of them has too much of
    return {name: count for name, count in counts.items() if count}


class Progress:
    """Logs a line of metrics every second: problems done, speed, accuracy by source, cost so far.

    It counts shards that other workers have finished, but not those that they have only begun. Any thread may add to
    it.
    """

    def __init__(
        self, job: SampleJob, places: list[Place], metrics: Metrics | None, workers: int, spent: Path | None = None
    ):
        """`spent`: the file of what this process spent, to which it adds, written when groups finish, at most once a
        second; None: none is kept."""
        self.places, self.metrics = places, metrics
        self.of = sum(place.problems for place in places)
        self.workers = workers  # processes or actors
        self.devices = workers * max([1, *(devices_of(task.engine) for task in job.tasks)])
        self.window = Window()
        self.began = self.since = self._looked = time.perf_counter()
        self.problems = self.logged = 0
        self._spent, before = spent, _read(spent)
        self.tokens, self.judge, self._before_s = before.tokens, before.judge, before.engine_s
        self._lock = threading.Lock()

    def add(
        self, group: SampledProblem, earlier: Earlier = None, judged_earlier: Mapping[str, int] | None = None
    ) -> None:
        """`earlier`: what an earlier attempt did with it. If sampled, it is no part of the speed; if scored, its tokens
        and judgments (`judged_earlier`) were counted then, if counts are kept."""
        counted = earlier == "scored" and self._spent is not None
        judge = Counter(group.judged)
        if counted:
            judge.subtract(judged_earlier or {})
        scored = [b["accuracy"] for b in group.rewards or () if "accuracy" in b]
        count = len(group.completions)
        self.merge(
            Window(
                samples=0 if earlier else count,
                tokens=0 if earlier else group.tokens,
                spent=0 if counted else group.tokens + group.prompt_tokens * count,
                problems=int(group.round == 0),
                failures=sum(group.failures["kinds"].values()),
                verdicts=Counter({group.source: len(scored)}),
                right=Counter({group.source: group.right}),
                judge=judge,
            )
        )

    def merge(self, more: Window) -> None:
        with self._lock:
            self._merge(more)

    def _merge(self, more: Window) -> None:
        for name, value in vars(more).items():
            setattr(self.window, name, getattr(self.window, name) + value)
        self.tokens += more.spent
        self.problems += more.problems
        self.judge.update(more.judge)
        if time.perf_counter() - self._looked > _LOG_S:
            self._looked = time.perf_counter()
            self._write()
            self.log()

    @property
    def engine_s(self) -> float:
        """Seconds times devices, of all attempts."""
        return self._before_s + (time.perf_counter() - self.began) * self.devices

    def save(self) -> None:
        """Writes what has been spent, for the next attempt."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._spent is not None:
            self._spent.parent.mkdir(parents=True, exist_ok=True)
            spent = {"engine_s": self.engine_s, "tokens": self.tokens, "judge": dict(self.judge)}
            replace_text(self._spent, json.dumps(spent))

    def log(self, last: bool = False) -> None:
        """Logs the counts since the last line. Only the `last` line has the last step: shards may be finished whose
        counts have not arrived."""
        if self.metrics is None:
            return
        now, window = time.perf_counter(), self.window
        finished = sum(place.problems for place in self.places if place.path.exists())
        step = min(self.of if last else self.of - 1, max(self.logged + 1, finished, self.problems))
        if step == self.logged or not (window.samples or (last and (self.logged or window.problems))):
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
