"""Sampling whole problem sets, shard by shard.

Workers may share a folder of shards: each takes a free shard and continues where a killed worker stopped.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo.config.engines import VLLM, Endpoint, devices_of
from grpo.config.jobs import SampleJob, SampleTask
from grpo.data.records import Problem, read_problems
from grpo.data.template import prompted_by
from grpo.distributed.process_group import Parallel
from grpo.generation.text_engines import Prompting, TextEngine, make_text_engine
from grpo.judging.background_verdicts import AnswerJudge
from grpo.processes.metrics_log import Metrics, write_result
from grpo.sampling.journal import Journal
from grpo.sampling.progress import Place, Progress, Window, judged, spent_file
from grpo.sampling.ray import make_on_ray
from grpo.sampling.shard import SampledProblem, Shard, writing_file
from grpo.scoring.sandbox_walls import check_walls
from grpo.scoring.scorer import Scorer

_LOOK_AGAIN_S = 0.5
_AT_ONCE = 4
"""Shards that one worker samples at once at endpoints, so that the last requests of a shard do not leave them idle."""
_OF_ENGINE = {"model", "engine", "template", "zero_template"}
_OF_SCORER = {"rewards", "helpful_model", "safe_model"}
"""Fields of a task from which its engine and its scorer are made."""


def run_sampling(job: SampleJob) -> None:
    """Writes out/<task>/shard-NNNNN.parquet for every task of the job."""
    parallel = Parallel.start(job.hardware)
    places = [place for task in job.tasks for place in places_of(task, job)]
    workers = job.ray.workers if job.ray else parallel.world
    metrics = Metrics(job.metrics) if parallel.is_main else None
    progress = Progress(job, places, metrics, workers, spent_file(job.state, parallel.rank))
    if job.ray:
        left = [place for place in places if not place.path.exists()]

        def make_worker() -> Worker:
            return Worker(job, Progress(job, left, None, workers))

        make_on_ray(job.ray, gpus_of_actor(job), left, make_worker, progress.merge)
    else:
        worker = Worker(job, progress, parallel)
        served = any(isinstance(task.engine, VLLM) and task.engine.kind == "server" for task in job.tasks)
        if served and parallel.world > 1:
            _make_in_step(worker, places, parallel)
        else:
            worker.make_all(_rotated(places, parallel))
        worker.close()
    progress.save()
    parallel.barrier()
    if parallel.is_main:
        for place in places:
            writing_file(place.path).unlink(missing_ok=True)  # left by a killed worker
        progress.log(last=True)
        total = sum(place.problems for place in places)
        write_result(job.result, total, total, engine_s=progress.engine_s, judge=judged(job.state))
    parallel.close()


def _make_in_step(worker: Worker, places: Sequence[Place], parallel: Parallel) -> None:
    """One engine's shards after another's: a vLLM server has the weights of one model at a time, and all processes take
    part in sending them."""
    for _, group in itertools.groupby(places, key=lambda place: _needs(place.task)):
        shards = [*group]
        # This waits, too, until no process samples from the model before.
        if parallel.any(any(not shard.path.exists() for shard in shards)):
            worker.load(shards[0].task)
            worker.make_all(_rotated(shards, parallel))


def _rotated(places: Sequence[Place], parallel: Parallel) -> Sequence[Place]:
    """The same places, begun at another one in each process, to avoid contention."""
    shift = parallel.rank * len(places) // parallel.world
    return [*places[shift:], *places[:shift]]


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


def gpus_of_actor(job: SampleJob) -> float:
    """GPUs that Ray gives to each actor of a job with `ray`."""
    assert job.ray is not None
    if job.ray.gpus is not None:
        return job.ray.gpus
    return 0 if job.hardware.device == "cpu" else max((devices_of(task.engine) for task in job.tasks), default=0)


def _rows(paths: list[Path]) -> int:
    files = [file for path in paths for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])]
    return sum(pq.read_metadata(file).num_rows for file in files)


class Worker:
    """Samples shards, one at a time or, at endpoints, a few. Engine and scorer stay loaded while consecutive tasks need
    the same ones."""

    def __init__(self, job: SampleJob, progress: Progress, parallel: Parallel | None = None):
        """`parallel`: the process, on whose GPU threads compute; None: on the first, an actor's own on Ray."""
        self.job, self.progress = job, progress
        self._begin_thread = parallel.use_device if parallel else None
        self._problems: tuple[str, list[Problem]] = ("", [])
        self._engine: tuple[object, TextEngine] | None = None
        self._scorer: tuple[object, Scorer] | None = None
        self._told: Counter[str] = Counter()  # counts of the scorer's judge that were already reported
        self._lock = threading.Lock()  # for all of these

    def load(self, task: SampleTask) -> None:
        """Loads what the task's shards need, whether this worker will make one or not."""
        with self._lock:
            self._load(task)

    def make_all(self, places: Sequence[Place]) -> None:
        """Samples shards until all exist, whether made by this worker or another."""
        while waiting := [place for place in places if not place.path.exists()]:
            for _, group in itertools.groupby(waiting, key=lambda place: _needs(place.task)):
                self._try_to_make_each([*group])
            if all(not place.path.exists() for place in waiting):
                time.sleep(_LOOK_AGAIN_S)  # other workers hold the rest, and may still be killed

    def make(self, place: Place) -> Window:
        """Samples one shard. Returns the counts of its metrics."""
        self.make_all([place])
        window, self.progress.window = self.progress.window, Window()
        return window

    def _try_to_make_each(self, places: Sequence[Place]) -> None:
        """`places` need the same engine and scorer."""
        at_once = _at_once(places[0].task)
        if at_once == 1:
            for place in places:
                self._try_to_make(place)
            return
        threads = ThreadPoolExecutor(at_once, "shard", initializer=self._begin_thread)
        futures = [threads.submit(self._try_to_make, place) for place in places]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            self._close_engine()  # so that the other shards end, too
            raise
        finally:
            threads.shutdown()

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
        with self._lock:
            engine, scorer = self._load(place.task)
            problems = self._problems_of(place.task)[place.start : place.stop]

        def add(group: SampledProblem) -> None:
            self.progress.add(group, shard.earlier(group), shard.judged_earlier(group))
            self._tell(scorer)

        shard = Shard(place.task, problems, self.job.seed, add)
        try:
            shard.make(path, journal, engine, scorer, self.job.scoring.max_failure_share)
        finally:
            self.progress.save()

    def _tell(self, scorer: Scorer) -> None:
        """With each group, because a later attempt does not ask about it again. Items are counted with their groups: a
        later attempt judges those again that no group has yet."""
        if scorer.judge is not None:
            with self._lock:
                counts = Counter(scorer.judge.voter.counts.to_dict())
                del counts["items"], counts["items/undecided"]
                self.progress.merge(Window(judge=counts - self._told))
                self._told = counts

    def _problems_of(self, task: SampleTask) -> list[Problem]:
        if self._problems[0] != task.name:
            check_walls(chosen_problems(task), self.job.scoring)
            self._problems = task.name, prompted_by(chosen_problems(task), task.template, task.zero_template)
        return self._problems[1]

    def _load(self, task: SampleTask) -> tuple[TextEngine, Scorer]:
        hardware = self.job.hardware
        of_engine, of_scorer = _needs(task)
        if self._scorer is None or self._scorer[0] != of_scorer:
            self._close_scorer()
            # The scorer's processes start while the models load.
            self._scorer = of_scorer, self._make_scorer(task)
            self._scorer[1].load_models(task.helpful_model, task.safe_model, hardware)
        if self._engine is None or self._engine[0] != of_engine:
            self._close_engine()
            prompting = Prompting(task.template, task.zero_template)
            alike = [other for other in self.job.tasks if _needs(other)[0] == of_engine]
            samplings = [each for other in alike for each in (other.sampling, *other.sampling_by_source.values())]
            self._engine = of_engine, make_text_engine(task.engine, task.model, prompting, hardware, samplings)
        return self._engine[1], self._scorer[1]

    def _make_scorer(self, task: SampleTask) -> Scorer:
        job, judge = self.job, None
        if job.judge:
            judge = AnswerJudge(job.judge, job.state / "judge", self.progress.workers)
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


def _needs(task: SampleTask) -> tuple[dict[str, Any], dict[str, Any]]:
    """What its engine and its scorer are made from."""
    return task.model_dump(include=_OF_ENGINE), task.model_dump(include=_OF_SCORER)


def _at_once(task: SampleTask) -> int:
    """How many shards to sample at once. Reward models in this process serve one thread."""
    return _AT_ONCE if isinstance(task.engine, Endpoint) and not (task.helpful_model or task.safe_model) else 1
