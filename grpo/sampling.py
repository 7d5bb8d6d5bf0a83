"""Sampling whole problem sets, in shards: a killed job loses at most the shard it was in."""

from __future__ import annotations

import time
from pathlib import Path

from grpo.data import Problem, Sample, read_problems, write_rows
from grpo.jobs import SampleJob, SampleTask
from grpo.parallel import Parallel
from grpo.policy import load_policy, load_tokenizer
from grpo.rewards import Response
from grpo.rollout import sample_groups, seed_of
from grpo.runlog import Metrics, write_result
from grpo.scoring import Failures, Scorer, Scores, responses_of
from grpo.template import prompt_tokens


def run_sampling(job: SampleJob) -> None:
    """Write out/<task>/shard-NNNNN.parquet for every task of the job."""
    parallel = Parallel.start(job.hardware)
    problems = {task.name: chosen_problems(task) for task in job.tasks}
    shards = {name: range(0, len(rows), job.shard_size) for name, rows in problems.items()}
    planned = sum(len(starts) for starts in shards.values())
    completed = 0
    metrics = Metrics(job.metrics) if parallel.main else None
    for task in job.tasks:
        folder = job.out / task.name
        folder.mkdir(parents=True, exist_ok=True)
        missing = [(i, start) for i, start in enumerate(shards[task.name]) if not shard_path(folder, i).exists()]
        todo = parallel.same(missing)[parallel.rank :: parallel.world]
        completed += len(shards[task.name]) - len(todo)
        if not todo:
            continue
        sampler = PolicySampler(task, job)
        for index, start in todo:
            began = time.perf_counter()
            rows, failures = sampler(problems[task.name][start : start + job.shard_size], job.seed, index)
            temporary = folder / f"writing-{parallel.rank}"
            write_rows(temporary, rows, Sample)
            temporary.replace(shard_path(folder, index))
            completed += 1
            tokens = sum(row.tokens for row in rows)
            accuracy = [row.rewards["accuracy"] for row in rows if "accuracy" in row.rewards]
            if metrics is None:
                continue
            metrics.log(
                completed,
                planned,
                samples=len(rows),
                completion_tokens=tokens / max(1, len(rows)),
                tokens_per_s=tokens / (time.perf_counter() - began),
                reward_failures=failures.kinds.total(),
                **({"accuracy": sum(accuracy) / len(accuracy)} if accuracy else {}),
            )
        sampler.scorer.close()
    parallel.barrier()
    if parallel.main:
        for left_by_killed in job.out.glob("*/writing*"):
            left_by_killed.unlink()
        done = sum(
            shard_path(job.out / name, i).exists() for name, starts in shards.items() for i in range(len(starts))
        )
        write_result(job.result, done, planned)
    parallel.close()


def chosen_problems(task: SampleTask) -> list[Problem]:
    problems = read_problems(task.problems)
    if task.first is None:
        return problems
    return [p for domain, count in task.first.items() for p in [q for q in problems if q.domain == domain][:count]]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.parquet"


class PolicySampler:
    """A policy with its tokenizer and scorer, loaded once a task."""

    def __init__(self, task: SampleTask, job: SampleJob):
        self.task, self.job = task, job
        self.tokenizer = load_tokenizer(task.model)
        self.scorer = Scorer({name: {} for name in task.rewards}, job.scoring)
        self.policy = load_policy(task.model, job.hardware)
        self.scorer.load_models(task.helpful_model, task.safe_model, job.hardware)

    def __call__(self, problems: list[Problem], seed: int, shard: int) -> tuple[list[Sample], Failures]:
        task = self.task
        prompts = [prompt_tokens(self.tokenizer, p.messages, task.template, task.zero_template) for p in problems]
        scores: dict[int, Scores] = {}
        for index, completions in sample_groups(
            self.policy,
            prompts,
            task.samples_per_problem,
            task.sampling,
            eos_id=self.tokenizer.eos_token_id,
            seeds=[seed_of(seed, shard, number) for number in range(len(prompts))],
        ):
            responses = responses_of(self.tokenizer, completions, task.sampling.max_new_tokens)
            # Scoring goes on in other processes while others are sampled.
            scores[index] = self.scorer.start(problems[index], responses)
        failures = Failures()
        samples: list[Sample] = []
        for index, problem in enumerate(problems):
            scored = scores[index].finish()
            failures.add(scored.failures)
            for response, breakdown in zip(scores[index].responses, scored.breakdowns, strict=True):
                samples.append(self._sample(problem, response, breakdown))
        failures.stop_above(self.job.scoring.max_failure_share)
        return samples, failures

    def _sample(self, problem: Problem, response: Response, rewards: dict[str, float]) -> Sample:
        parts = response.parts
        return Sample(
            problem_id=problem.id,
            policy=self.task.policy,
            completion=response.text,
            reasoning=parts.reasoning,
            summary=parts.summary,
            answer=parts.answer or "",
            rewards=rewards,
            tokens=response.tokens,
            finish_reason="stop" if response.finished else "length",
            domain=problem.domain,
            language=problem.language,
        )
