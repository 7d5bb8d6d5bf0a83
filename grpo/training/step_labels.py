"""Labels the steps of chains of reasoning without annotators, by how often the correct answer is reached from each step
(Math-Shepherd, arXiv 2312.08935).

From the end of each step, `rollouts` completions are sampled and verified. Differences from the paper: the completer is
any model that the job names, usually the policy itself, and steps are lines.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.config.jobs import StepLabelsJob
from grpo.data.completions import all_ends, completion_texts
from grpo.data.records import Problem, Sample, read_problems, read_rows
from grpo.data.template import continuation, opened_reasoning, prompt_tokens
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.generation.sampler import sample_groups
from grpo.model.loading import load_policy, load_tokenizer
from grpo.model_folder import generation_settings
from grpo.processes.metrics_log import Metrics, write_result
from grpo.rewards.functions import Response
from grpo.rewards.steps import split_steps
from grpo.sampling.journal import Journal
from grpo.sampling.shard import seed_of_name
from grpo.scoring.scorer import Failures, Scorer
from grpo.training.process_reward_model import LABELS

_REST_OF_LINE = re.compile(r"[^\S\n]*\n?")
_LOOK_AGAIN_S = 0.5


class Chain(NamedTuple):
    """A completion and its steps. `ends`: character offsets of the steps' ends; `prefixes`: the texts to continue."""

    problem: Problem
    response: str
    ends: list[int]
    prefixes: list[str]


def chains_of(problems: Sequence[Problem], samples: Sequence[Sample]) -> list[Chain]:
    """The distinct completions of reasoning problems that have steps, in the order of the samples.

    Raises InputError for a sample of a problem that is not among the problems.
    """
    known = {problem.id: problem for problem in problems}
    chains: dict[tuple[str, str], Chain] = {}
    for sample in samples:
        if sample.domain != "reasoning":
            continue
        if sample.problem_id not in known:
            raise InputError(f"samples: problem {sample.problem_id!r} is not among the problems; give both of one set")
        ends = [end for _, end in split_steps(sample.completion)]
        if ends:
            prefixes = [prefix_to(sample.completion, end) for end in ends]
            chain = Chain(known[sample.problem_id], sample.completion, ends, prefixes)
            chains.setdefault((sample.problem_id, sample.completion), chain)
    return [*chains.values()]


def prefix_to(text: str, end: int) -> str:
    """The text up to the end of a step's line, including the line break, so that a policy continues on a new line."""
    return text[:end] + _REST_OF_LINE.match(text, end)[0]  # type: ignore[index]


def label_row(chain: Chain, right: Sequence[int], rollouts: int, held_out_share: float) -> dict[str, Any]:
    """A row of labels. `right`: number of correct rollouts from each step. The problem's text determines whether the
    row is held out, so that no problem is in both parts."""
    digest = hashlib.sha256(chain.problem.text.encode()).hexdigest()
    return {
        "problem_id": chain.problem.id,
        "messages": chain.problem.messages,
        "response": chain.response,
        "ends": chain.ends,
        "right": [*right],
        "rollouts": rollouts,
        "held_out": int(digest[:8], 16) / 2**32 < held_out_share,
    }


def run_step_labels(job: StepLabelsJob) -> None:
    """Writes out/labels-NNNNN.parquet shard by shard, so that a killed job loses at most one for each process.
    Processes share the shards."""
    parallel = Parallel.start(job.hardware)
    chains = chains_of(read_problems(job.problems), [*read_rows(job.samples, Sample)])
    if not chains:
        raise InputError(f"{job.samples}: no sample of a reasoning problem has steps, lines between its think tags")
    shards = [chains[start : start + job.shard_chains] for start in range(0, len(chains), job.shard_chains)]
    paths = [job.out / f"labels-{number:05d}.parquet" for number in range(len(shards))]
    progress = _Progress(paths, len(chains), Metrics(job.metrics)) if parallel.is_main else None
    labeller = Labeller(job)
    try:
        for number in free_shards(paths, job.state):
            _write(paths[number], labeller(shards[number]))
            if progress is not None:
                progress.log()
    finally:
        labeller.close()
    parallel.barrier()  # every shard exists, so nobody waits here for one that takes longer than collectives may
    if progress is not None:
        progress.log()
        rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
        counts = {"chains": len(rows), "steps": sum(len(row["ends"]) for row in rows)}
        write_result(job.result, len(chains), len(chains), counts=counts, metrics=_shares(rows))
    parallel.close()


def free_shards(paths: Sequence[Path], locks: Path) -> Iterator[int]:
    """Yields the numbers of shards that this process is to make, until all exist, whether made by it or another.

    It holds a lock in the folder `locks` on each meanwhile. The system releases that of a killed process, whose shard
    is then free.
    """
    while waiting := [number for number, path in enumerate(paths) if not path.exists()]:
        for number in waiting:
            try:
                lock = Journal(locks / f"{paths[number].stem}.lock")
            except BlockingIOError:
                continue
            if not paths[number].exists():
                yield number
            lock.remove()
        if all(not paths[number].exists() for number in waiting):
            time.sleep(_LOOK_AGAIN_S)  # others hold the rest, and may still be killed


class _Progress:
    """Logs the shards that exist, whoever made them, each in one line only."""

    def __init__(self, paths: Sequence[Path], of: int, metrics: Metrics):
        self._left, self._done, self._of, self._metrics = [*paths], 0, of, metrics

    def log(self) -> None:
        """Writes a line about the shards that are new since the last one, if there are any."""
        if new := [path for path in self._left if path.exists()]:
            self._left = [path for path in self._left if path not in new]
            rows = [row for path in new for row in pq.read_table(path).to_pylist()]
            self._done += len(rows)
            self._metrics.log(self._done, self._of, **_shares(rows))


class Labeller:
    """Labels steps of solutions: samples completions from each step and verifies them."""

    def __init__(self, job: StepLabelsJob):
        self.job = job
        self.scorer = Scorer({"accuracy": {}}, job.scoring)  # the scorer's processes start while the model loads
        self.tokenizer = load_tokenizer(job.model)
        self.model = load_policy(job.model, job.hardware)

    def __call__(self, chains: Sequence[Chain]) -> list[dict[str, Any]]:
        """Returns labelled rows. Steps that several chains of a problem share are continued only once."""
        prefixes = list(dict.fromkeys((c.problem.id, prefix) for c in chains for prefix in c.prefixes))
        right = dict(zip(prefixes, self._right({c.problem.id: c.problem for c in chains}, prefixes), strict=True))
        return [
            label_row(c, [right[c.problem.id, p] for p in c.prefixes], self.job.rollouts, self.job.held_out_share)
            for c in chains
        ]

    def _right(self, problems: dict[str, Problem], prefixes: Sequence[tuple[str, str]]) -> list[int]:
        """Number of correct rollouts from each (problem, prefix)."""
        counts = [0] * len(prefixes)
        failures, waiting = Failures(), []
        for place, responses in self._continued(problems, prefixes):
            waiting.append((place, self.scorer.start(problems[prefixes[place][0]], responses)))
        for place, scores in waiting:
            scored = scores.finish()
            failures.add(scored.failures)
            counts[place] = sum(breakdown["accuracy"] == 1.0 for breakdown in scored.breakdowns)
        failures.stop_above(self.job.scoring.max_failure_share)
        return counts

    def _continued(
        self, problems: dict[str, Problem], prefixes: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[int, list[Response]]]:
        """Yields the index of each (problem, prefix) and the whole completions, which begin with the prefix."""
        prompts = [self._prompt(problems[name], prefix) for name, prefix in prefixes]
        seeds = [seed_of_name(self.job.seed, f"{name}\n{prefix}", 0) for name, prefix in prefixes]
        sampling, longest = self.job.sampling, self.job.sampling.max_new_tokens
        ends = all_ends(self.tokenizer, generation_settings(self.job.model))
        groups = sample_groups(self.model, prompts, self.job.rollouts, sampling, eos_id=ends, seeds=seeds)
        for place, completions in groups:
            whole = [prefixes[place][1] + text for text in completion_texts(self.tokenizer, completions)]
            pairs = zip(whole, completions, strict=True)
            problem = problems[prefixes[place][0]]
            yield place, [Response.to(problem, text, len(c.tokens), c.finished, longest) for text, c in pairs]

    def _prompt(self, problem: Problem, prefix: str) -> list[int]:
        prompt = prompt_tokens(self.tokenizer, problem.messages, "chat")
        rest = continuation(opened_reasoning(self.tokenizer, prompt), prefix)
        return [*prompt, *self.tokenizer(rest, add_special_tokens=False)["input_ids"]]

    def close(self) -> None:
        self.scorer.close()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    writing = path.with_name(f"writing-{path.stem}")
    pq.write_table(pa.Table.from_pylist(rows), writing)
    writing.replace(path)


def _shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of both labels over all steps."""
    steps = [(right, row["rollouts"]) for row in rows for right in row["right"]]
    return {name: sum(label(*step) for step in steps) / len(steps) for name, label in LABELS.items()}
