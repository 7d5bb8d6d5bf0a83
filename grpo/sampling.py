"""Sampling whole problem sets, in shards: a killed job loses at most the shard it was in."""

from __future__ import annotations

import time
from pathlib import Path

from grpo.config import SampleJob, SampleTask
from grpo.data import Problem, Sample, read_problems, write_rows
from grpo.policy import load_policy, load_tokenizer
from grpo.rollout import generator_for, sample
from grpo.runlog import Metrics, write_result
from grpo.scoring import Scorer
from grpo.template import parse, prompt_tokens


def run_sampling(job: SampleJob) -> None:
    """Write out/<task>/shard-NNNNN.parquet for every task of the job."""
    problems = {task.name: chosen_problems(task) for task in job.tasks}
    shards = {name: range(0, len(rows), job.shard_size) for name, rows in problems.items()}
    planned = sum(len(starts) for starts in shards.values())
    completed = 0
    metrics = Metrics(job.metrics)
    for task in job.tasks:
        folder = job.out / task.name
        folder.mkdir(parents=True, exist_ok=True)
        todo = [(i, start) for i, start in enumerate(shards[task.name]) if not shard_path(folder, i).exists()]
        completed += len(shards[task.name]) - len(todo)
        sampler = PolicySampler(task, job) if todo else None
        for index, start in todo:
            assert sampler is not None
            began = time.perf_counter()
            rows = sampler(problems[task.name][start : start + job.shard_size], job.seed, index)
            temporary = folder / "writing"
            write_rows(temporary, rows, Sample)
            temporary.replace(shard_path(folder, index))
            completed += 1
            tokens = sum(row.tokens for row in rows)
            accuracy = [row.rewards["accuracy"] for row in rows if "accuracy" in row.rewards]
            metrics.log(
                completed,
                planned,
                samples=len(rows),
                completion_tokens=tokens / max(1, len(rows)),
                tokens_per_s=tokens / (time.perf_counter() - began),
                **({"accuracy": sum(accuracy) / len(accuracy)} if accuracy else {}),
            )
    write_result(job.result, completed, planned)


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
        self.task = task
        self.tokenizer = load_tokenizer(task.model)
        self.policy = load_policy(task.model, job.hardware)
        self.scorer = Scorer(task.helpful_model, task.safe_model, job.hardware)

    def __call__(self, problems: list[Problem], seed: int, shard: int) -> list[Sample]:
        task = self.task
        prompts = [prompt_tokens(self.tokenizer, p.messages, task.template, task.zero_template) for p in problems]
        groups = sample(
            self.policy,
            prompts,
            task.samples_per_problem,
            task.sampling,
            pad_id=self.tokenizer.pad_token_id,
            eos_id=self.tokenizer.eos_token_id,
            generator=generator_for(seed, shard),
        )
        repeated = [p for p in problems for _ in range(task.samples_per_problem)]
        completions = [c for group in groups for c in group]
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
        parts = [parse(text) for text in texts]
        return [
            Sample(
                problem_id=problem.id,
                policy=task.policy,
                completion=text,
                reasoning=part.reasoning,
                summary=part.summary,
                answer=part.answer or "",
                rewards=rewards,
                tokens=len(completion.tokens),
                finish_reason="stop" if completion.finished else "length",
                domain=problem.domain,
                language=problem.language,
            )
            for problem, text, part, completion, rewards in zip(
                repeated, texts, parts, completions, self.scorer(repeated, parts, texts), strict=True
            )
        ]
