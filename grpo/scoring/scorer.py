"""Computes the full reward breakdown of completions: rules, reward models and step rewards. Counts failures."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo.config.common import Hardware
from grpo.config.scoring import Scoring
from grpo.data.completions import Completion, completion_texts
from grpo.data.records import Problem
from grpo.data.template import opened_reasoning
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError, TrainingStopped
from grpo.judging.background_verdicts import AnswerJudge
from grpo.processes.pool import Failure, Pool
from grpo.rewards.functions import Response
from grpo.rewards.registry import JUDGE_REWARDS, MODEL_REWARDS, find, load, score_many, score_one
from grpo.rewards.steps import is_folder, step_rewards
from grpo.rewards.verifiers import time_limit_s
from grpo.scoring.judge_rewards import JudgedGroup, ask
from grpo.scoring.reward_model import RewardModelScorer, member_folders
from grpo.scoring.step_model import StepScorer


def responses_of(
    tokenizer: Any, problem: Problem, prompt: Sequence[int], completions: Sequence[Completion], max_tokens: int
) -> list[Response]:
    """Converts sampled completions to the form that rewards read; `max_tokens` is their length limit."""
    opened = opened_reasoning(tokenizer, prompt)
    return [
        Response.to(problem, opened + text, len(c.tokens), c.finished, max_tokens)
        for text, c in zip(completion_texts(tokenizer, completions), completions, strict=True)
    ]


class Scorer:
    """Computes reward breakdowns: rules run in a pool of killable processes, reward models in this process.

    Scoring begins with `start` and runs in the background; `finish` waits for it. On general prompts the
    helpful model reads only the final summary, and the safety model reads the whole response (R1, stage 4). Steps of
    reasoning problems are scored by a rule in the pool or by a process reward model in this process.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, Any]],
        scoring: Scoring,
        step_reward: str | None = None,
        judge: AnswerJudge | None = None,
    ):
        """`rewards`: name of each reward -> its options; `step_reward`: rule or model folder for the reasoning steps;
        `judge`: judges answers without a rule, and the rewards `judge` and `rubric`. `close` also closes the judge.

        Starts the worker processes. `load_models` loads the reward models.
        """
        self.step_reward = step_reward
        self.step_model: StepScorer | None = None
        self.judge, self.rewards = judge, frozenset(rewards)
        rules = [name for name in rewards if name not in MODEL_REWARDS + JUDGE_REWARDS]
        self.rules = {name: (find(name), dict(rewards[name])) for name in rules}
        job_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes on this machine, each with its own pool
        workers = scoring.workers or max(1, (os.cpu_count() or 1) // job_processes)
        prepare = functools.partial(load, rules)  # imports do not count towards an item's time limit
        self.pool = Pool(workers, scoring.time_limit_s, int(scoring.memory_gb * 1e9), prepare, scoring.environment)
        self.helpful: RewardModelScorer | None = None
        self.safe: RewardModelScorer | None = None

    def load_models(
        self,
        helpful_model: str | None,
        safe_model: str | None,
        hardware: Hardware,
        uncertainty_penalty: float = 0.0,
        parallel: Parallel | None = None,
    ) -> None:
        """Loads reward models for general prompts, each from the folder of a model or of an ensemble, and the process
        reward model; sharded over the processes of `parallel`. None: this process has them whole.

        Raises InputError if `uncertainty_penalty` is set and no path is an ensemble.
        """
        paths = [path for path in (helpful_model, safe_model) if path]
        if uncertainty_penalty and paths and all(len(member_folders(path)) == 1 for path in paths):
            raise InputError(f"uncertainty_penalty needs an ensemble, {paths[0]} is one model; set the penalty to 0")
        options: dict[str, Any] = {
            "hardware": hardware,
            "uncertainty_penalty": uncertainty_penalty,
            "parallel": parallel,
        }
        self.helpful = RewardModelScorer(helpful_model, **options) if helpful_model else None
        self.safe = RewardModelScorer(safe_model, **options) if safe_model else None
        if self.step_reward is not None and is_folder(self.step_reward):
            self.step_model = StepScorer(self.step_reward, hardware, parallel=parallel)

    def start(self, problem: Problem, responses: Sequence[Response]) -> Scores:
        """Starts scoring the responses to a problem."""
        submit = self.pool.submit
        judged = ask(self.judge, problem, responses, self.rewards)
        rules = {n: rule for n, rule in self.rules.items() if rule[0].scores(problem)}
        quick = {name: options for name, (reward, options) in rules.items() if reward.quick(problem)}
        within = functools.partial(self.pool.submit_within, time_limit_s(problem))
        slow = [
            {name: within(score_one, name, rules[name][1], problem, response) for name in rules if name not in quick}
            for response in responses
        ]
        steps = None
        by_rule = self.step_reward is not None and not is_folder(self.step_reward)
        if by_rule and problem.domain == "reasoning":
            steps = [submit(step_rewards, self.step_reward, problem, response.text) for response in responses]
        together = submit(score_many, quick, problem, list(responses)) if quick else None
        return Scores(self, problem, list(responses), [*rules], quick, together, slow, steps, judged)

    def finish(self, groups: Sequence[Scores]) -> list[Scored]:
        """Waits for the rules and the judge of the responses to each problem, then runs the reward models on all of
        them. If these are sharded, all processes must call it together, each with its problems.

        A failed reward is counted and scores 0: an answer that breaks its verifier is not correct. A response whose
        step reward failed has no step scores.
        """
        scored = [group.by_rules() for group in groups]
        general = [i for i, group in enumerate(groups) if group.problem.domain == "general"]
        messages = [groups[i].problem.messages for i in general for _ in groups[i].responses]
        responses = [response for i in general for response in groups[i].responses]
        breakdowns = [breakdown for i in general for breakdown in scored[i].breakdowns]
        if self.helpful:
            scores = self.helpful(messages, [response.parts.summary for response in responses])
            for breakdown, score in zip(breakdowns, scores, strict=True):
                breakdown["helpful"] = score
        if self.safe:
            scores = self.safe(messages, [response.text for response in responses])
            for breakdown, score in zip(breakdowns, scores, strict=True):
                # The head returns a logit; the probability of "safe" is bounded, as a reward should be.
                breakdown["safe"] = torch.tensor(score).sigmoid().item()
        if self.step_model:
            reasoning = [i for i, group in enumerate(groups) if group.problem.domain == "reasoning"]
            chains = [(groups[i].problem.messages, [r.text for r in groups[i].responses]) for i in reasoning]
            for i, steps in zip(reasoning, self.step_model(chains), strict=True):
                scored[i].steps = steps
        return scored

    def close(self) -> None:
        self.pool.close()
        if self.judge is not None:
            self.judge.close()


@dataclass
class Failures:
    """Counts of failed rewards by kind. A program that breaks a limit has its own kinds ("code_timeout", ...); a
    verifier that ran too long, died or raised counts as "timeout", "crash" or "error"; an undecided judge as
    "judge_undecided"."""

    completions: int = 0  # scored in total
    kinds: Counter[str] = field(default_factory=Counter)
    broken: int = 0  # completions with at least one failing verifier
    example: str = ""  # message of the first failing verifier

    def count(self, failures: Sequence[Failure]) -> None:
        """Adds the failures of one completion."""
        self.kinds.update(failure.kind for failure in failures)
        if verifier_failures := [failure for failure in failures if not failure.of_answer]:
            self.broken += 1
            self.example = self.example or verifier_failures[0].message

    def add(self, more: Failures) -> None:
        self.completions += more.completions
        self.kinds += more.kinds
        self.broken += more.broken
        self.example = self.example or more.example

    def stop_above(self, share: float) -> None:
        """Raises TrainingStopped if verifiers failed for more than `share` of the completions."""
        if self.broken > share * self.completions:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
            raise TrainingStopped(
                f"rewards failed for {self.broken} of {self.completions} completions ({kinds}); the first: "
                f"{self.example}; mend the reward, or, if the stage has settings `scoring`, raise their time_limit_s, "
                "memory_gb or max_failure_share"
            )


@dataclass
class Scored:
    """Scores of the responses to a problem."""

    breakdowns: list[dict[str, float]]  # unweighted; 0 where a reward failed or a judge gave no verdict
    given: list[dict[str, float]]  # of these, what rules and the judge gave
    steps: list[list[tuple[int, float]]] | None  # (character where a step ends, its reward); None: outcome supervision
    failures: Failures
    judged: dict[str, int] = field(default_factory=dict)  # items and items/undecided of grpo/judging/counts.py


@dataclass
class Scores:
    """Pending scores of the responses to a problem."""

    scorer: Scorer
    problem: Problem
    responses: list[Response]
    rules: list[str]
    quick: dict[str, dict[str, Any]]  # name -> options of the rewards scored in one task
    together: Future[Any] | None
    slow: list[dict[str, Future[Any]]]
    steps: list[Future[Any]] | None
    judged: JudgedGroup | None

    @property
    def ready(self) -> bool:
        """Whether rules and judge have finished."""
        futures = [future for pending in self.slow for future in pending.values()]
        futures += [*(self.steps or []), *([self.together] if self.together else [])]
        return all(future.done() for future in futures) and (self.judged is None or self.judged.ready)

    def finish(self) -> Scored:
        """`Scorer.finish` for these alone."""
        return self.scorer.finish([self])[0]

    def by_rules(self) -> Scored:
        """Waits for the rules and the judge."""
        quick = self._quick()
        slow = [{name: future.result() for name, future in pending.items()} for pending in self.slow]
        results = [{name: (q | s)[name] for name in self.rules} for q, s in zip(quick, slow, strict=True)]
        steps = None if self.steps is None else [future.result() for future in self.steps]
        failures = Failures(completions=len(results))
        given = [{n: v for n, v in result.items() if not isinstance(v, Failure)} for result in results]
        breakdowns = [{n: scores.get(n, 0.0) for n in result} for result, scores in zip(results, given, strict=True)]
        undecided = self.judged.finish(breakdowns, given) if self.judged else [[] for _ in results]
        for i, result in enumerate(results):
            values = [*result.values(), *(() if steps is None else (steps[i],)), *undecided[i]]
            failures.count([value for value in values if isinstance(value, Failure)])
        step_scores = None if steps is None else [[] if isinstance(step, Failure) else step for step in steps]
        return Scored(breakdowns, given, step_scores, failures, self.judged.counts if self.judged else {})

    def _quick(self) -> list[dict[str, Any]]:
        if self.together is None:
            return [{} for _ in self.responses]
        results = self.together.result()
        if isinstance(results, Failure):  # score each separately, so that only the failing one counts
            submit, problem = self.scorer.pool.submit, self.problem
            single = [{n: submit(score_one, n, o, problem, r) for n, o in self.quick.items()} for r in self.responses]
            results = [{name: future.result() for name, future in pending.items()} for pending in single]
        return results
