"""Sampling whole problem sets, shard by shard.

Workers may share a folder of shards: each takes a free shard and continues where a killed worker stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from grpo.config.jobs import SampleJob, SampleTask
from grpo.data.records import Problem, read_problems
from grpo.data.template import prompted_by
from grpo.distributed.process_group import Parallel
from grpo.generation.text_engines import Prompting, TextEngine, make_text_engine
from grpo.judging.background_verdicts import AnswerJudge
from grpo.processes.metrics_log import Metrics, write_result
from grpo.sampling.journal import Journal
from grpo.sampling.ray import make_on_ray
from grpo.sampling.shard import SampledProblem, Shard, writing_file
from grpo.scoring.sandbox_walls import check_walls
from grpo.scoring.scorer import Scorer

_LOOK_AGAIN_S = 0.5
_LOG_S = 1.0
_OF_ENGINE = {"model", "engine", "template", "zero_template"}
_OF_SCORER = {"rewards", "helpful_model", "safe_model"}
"""Fields of a task from which its engine and its scorer are made."""


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


def run_sampling(job: SampleJob) -> None:
    """Writes out/<task>/shard-NNNNN.parquet for every task of the job."""
    parallel = Parallel.start(job.hardware)
    places = [place for task in job.tasks for place in places_of(task, job)]
    progress = Progress(job, places, Metrics(job.metrics) if parallel.is_main else None)
    if job.ray:
        left = [place for place in places if not place.path.exists()]
        make_on_ray(job.ray, left, lambda: Worker(job, Progress(job, left, None)), progress.merge)
    else:
        worker = Worker(job, progress)
        # The processes of a job start at different shards to avoid contention.
        shift = parallel.rank * len(places) // parallel.world
        worker.make_all(places[shift:] + places[:shift])
        worker.close()
    judged = dict(sum(parallel.all_gather(progress.judge), Counter[str]()))
    if parallel.is_main:
        for place in places:
            writing_file(place.path).unlink(missing_ok=True)  # left by a killed worker
        progress.log()
        total = sum(place.problems for place in places)
        write_result(job.result, total, total, engine_s=progress.engine_s, judge=judged)
    parallel.close()


def places_of(task: SampleTask, job: SampleJob) -> Iterator[Place]:
    """Problems and output file of each shard of a task, in order."""
    folder = job.out / task.name
    folder.mkdir(parents=True, exist_ok=True)
    count = len(chosen_problems(task)) if task.first is not None else _rows(task.problems)
    for index, start in enumerate(range(0, count, job.shard_size)):
        yield Place(task, start, min(start + job.shard_size, count), folder / f"shard-{index:05d}.parquet")


def chosen_problems(task: SampleTask) -> list[Problem]:
    """The problems of a task: all of them, or the first ones of each domain."""
    problems = read_problems(task.problems)
    if task.first is None:
        return problems
    return [p for domain, count in task.first.items() for p in [q for q in problems if q.domain == domain][:count]]


def _rows(paths: list[Path]) -> int:
    files = [file for path in paths for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])]
    return sum(pq.read_metadata(file).num_rows for file in files)


class Worker:
    """Samples shards, one at a time. Engine and scorer stay loaded while consecutive tasks need the same ones."""

    def __init__(self, job: SampleJob, progress: Progress):
        self.job, self.progress = job, progress
        self._problems: tuple[str, list[Problem]] = ("", [])
        self._engine: tuple[object, TextEngine] | None = None
        self._scorer: tuple[object, Scorer] | None = None
        self._told: Counter[str] = Counter()  # counts of the scorer's judge that were already reported

    def make_all(self, places: Sequence[Place]) -> None:
        """Samples shards until all exist, whether made by this worker or another."""
        while waiting := [place for place in places if not place.path.exists()]:
            for place in waiting:
                self._try_to_make(place)
            if all(not place.path.exists() for place in waiting):
                time.sleep(_LOOK_AGAIN_S)  # other workers hold the rest, and may still be killed

    def make(self, place: Place) -> Window:
        """Samples one shard. Returns the counts of its metrics."""
        self.make_all([place])
        window, self.progress.window = self.progress.window, Window()
        return window

    def _try_to_make(self, place: Place) -> None:
        """Does nothing if another worker holds the shard or has just finished it."""
        path = place.path
        try:
            journal = Journal(path.with_suffix(".journal"))
        except BlockingIOError:
            return
        if path.exists():
            journal.remove()
            return
        engine, scorer = self._load(place.task)
        problems = self._problems_of(place.task)[place.start : place.stop]
        shard = Shard(place.task, problems, self.job.seed, self.progress.add)
        shard.make(path, journal, engine, scorer, self.job.scoring.max_failure_share)
        if scorer.judge is not None:
            counts = Counter(scorer.judge.voter.counts.to_dict())
            self.progress.merge(Window(judge=counts - self._told))
            self._told = counts

    def _problems_of(self, task: SampleTask) -> list[Problem]:
        if self._problems[0] != task.name:
            check_walls(chosen_problems(task), self.job.scoring)
            self._problems = task.name, prompted_by(chosen_problems(task), task.template, task.zero_template)
        return self._problems[1]

    def _load(self, task: SampleTask) -> tuple[TextEngine, Scorer]:
        hardware = self.job.hardware
        of_engine, of_scorer = task.model_dump(include=_OF_ENGINE), task.model_dump(include=_OF_SCORER)
        if self._scorer is None or self._scorer[0] != of_scorer:
            self._close_scorer()
            # The scorer's processes start while the models load.
            self._scorer = of_scorer, self._make_scorer(task)
            self._scorer[1].load_models(task.helpful_model, task.safe_model, hardware)
        if self._engine is None or self._engine[0] != of_engine:
            self._close_engine()
            prompting = Prompting(task.template, task.zero_template)
            self._engine = of_engine, make_text_engine(task.engine, task.model, prompting, hardware)
        return self._engine[1], self._scorer[1]

    def _make_scorer(self, task: SampleTask) -> Scorer:
        job, judge = self.job, None
        if job.judge:
            judge = AnswerJudge(job.judge, job.state / "judge", job.hardware.processes * job.hardware.nodes)
        rewards = [*task.rewards, *(["rubric"] if judge else [])]
        return Scorer({name: {} for name in rewards}, job.scoring, judge=judge)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine[1].close()
            self._engine = None

    def _close_scorer(self) -> None:
        if self._scorer is not None:
            self._scorer[1].close()
            self._scorer, self._told = None, Counter()

    def close(self) -> None:
        self._close_engine()
        self._close_scorer()


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

    It counts shards that other workers have finished, but not those that they have only begun.
    """

    def __init__(self, job: SampleJob, places: list[Place], metrics: Metrics | None):
        self.places, self.metrics = places, metrics
        self.of = sum(place.problems for place in places)
        self.devices = job.ray.workers if job.ray else job.hardware.processes * job.hardware.nodes
        self.window, self.judge = Window(), Counter[str]()
        self.began = self.since = time.perf_counter()
        self.tokens = self.problems = self.logged = 0

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

    def log(self) -> None:
        now, window = time.perf_counter(), self.window
        finished = sum(place.problems for place in self.places if place.path.exists())
        step = min(self.of, max(self.logged + 1, finished, self.problems))
        if self.metrics is None or step == self.logged or not window.samples:
            return
        seconds = now - self.since
        right = {f"accuracy_{source}": window.right[source] / n for source, n in sorted(window.verdicts.items()) if n}
        if scored := window.verdicts.total():
            right = {"accuracy": window.right.total() / scored} | (right if len(right) > 1 else {})
        self.metrics.log(
            step,
            self.of,
            samples=window.samples,
            completion_tokens=window.tokens / window.samples,
            tokens_per_s=window.tokens / seconds,
            samples_per_s=window.samples / seconds,
            reward_failures=window.failures,
            tokens_so_far=self.tokens,
            device_hours=self.engine_s / 3600,
            **right,
        )
        self.logged, self.window, self.since = step, Window(), now
