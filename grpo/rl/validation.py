"""Validation during training: samples completions of separate problems."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.config.jobs import RLJob
from grpo.config.validation import REWARD
from grpo.data.records import Problem, read_problems
from grpo.data.template import prompted_by
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.rewards.registry import JUDGE_REWARDS, MODEL_REWARDS, find, total
from grpo.rl.collector import RolloutCollector
from grpo.rl.model_set import Models
from grpo.scoring.judge_rewards import judged_rewards
from grpo.scoring.scorer import Failures
from grpo.training.selection import PREFIX, Selection

_DRAW = (2**32,)
"""All validations sample with the same seeds, which no rollout uses, so that only the policy differs between them."""


class Validator:
    """Runs the validations of one job."""

    def __init__(self, job: RLJob, collect: RolloutCollector, models: Models, parallel: Parallel):
        self.job, self.settings, self.choice = job, job.settings, job.settings.validation
        self.collect, self.parallel = collect, parallel
        self.problems = validation_problems(job, [*collect.orders])
        _check_metric(job, self.problems)
        self.selection = Selection(
            parallel, job.state, {"policy": models.policy}, self.settings.keep, self.choice.patience
        )

    def due(self, step: int) -> bool:
        assert self.settings.validate_every is not None
        return step % self.settings.validate_every == 0 or step == self.settings.steps

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of the policy after `step`. All processes must call it together."""
        metrics = self._measure(step)
        self.selection.observe(step, metrics[PREFIX + self.choice.metric], metrics)
        return metrics

    def _measure(self, step: int) -> dict[str, float]:
        choice, weights = self.choice, self.collect.weights
        self.collect.wait()  # the engine is busy sampling the next rollout
        request = self.collect.prefetcher.sample(
            self.problems,
            step,
            _DRAW,
            sampling=choice.sampling,
            completions=choice.samples_per_problem,
            logprobs=False,
        )
        failures, mine = Failures(), dict[int, list[dict[str, float]]]()
        sampled = request.results.result()
        finished = self.collect.scorer.finish([scores for _, scores in sampled.values()])
        for (number, (completions, _)), scored in zip(sampled.items(), finished, strict=True):
            failures.add(scored.failures)
            lengths = [{"tokens": float(len(c.tokens)), "truncated": float(not c.finished)} for c in completions]
            rewards = [{REWARD: total(breakdown, weights), **breakdown} for breakdown in scored.breakdowns]
            mine[number] = [
                {**of_rewards, **{f"completion_{name}": value for name, value in of_length.items()}}
                for of_rewards, of_length in zip(rewards, lengths, strict=True)
            ]
        every, measured = Failures(), dict[int, list[dict[str, float]]]()
        for share, failed in self.parallel.all_gather((mine, failures)):
            measured |= share
            every.add(failed)
        every.stop_above(self.settings.scoring.max_failure_share)
        # In problem order, so that sums do not depend on the number of processes.
        rows = [row for number in sorted(measured) for row in measured[number]]
        names = sorted({name for row in rows for name in row})
        return {PREFIX + name: _mean([row[name] for row in rows if name in row]) for name in names}


def validation_problems(job: RLJob, domains: Sequence[str]) -> list[Problem]:
    """Returns the first validation problems of each domain that the job trains on, in the style of its prompts.

    Raises InputError if a domain has none, or if one of them is also a training problem.
    """
    problems = prompted_by(read_problems(job.validation_problems), job.template, job.zero_template)
    trained_on = {problem.text for problem in read_problems(job.problems)}
    chosen: list[Problem] = []
    for domain in domains:
        of_domain = [problem for problem in problems if problem.domain == domain]
        if not of_domain:
            raise InputError(f"{job.validation_problems[0]}: no {domain} problems here, but this job trains on them")
        chosen += of_domain[: job.settings.validation.problems]
    if leaked := next((problem for problem in chosen if problem.text in trained_on), None):
        raise InputError(f"{job.validation_problems[0]}: problem {leaked.id!r} is among those that the job trains on")
    return chosen


def _check_metric(job: RLJob, problems: Sequence[Problem]) -> None:
    """Raises InputError if no validation problem has the metric by which checkpoints are selected."""
    settings = job.settings
    found = {name for problem in problems for name in _measured(job, problem)}
    measured = [REWARD, *(name for name in dict.fromkeys([*settings.rewards, *MODEL_REWARDS]) if name in found)]
    if (metric := settings.validation.metric) not in measured:
        raise InputError(
            f"validation.metric {metric!r} is measured on none of the validation problems; choose from "
            f"{', '.join(measured)}"
        )


def _measured(job: RLJob, problem: Problem) -> set[str]:
    """Names of the rewards of completions to the problem."""
    rewards = job.settings.rewards
    names = {n for n in rewards if n not in MODEL_REWARDS + JUDGE_REWARDS and find(n).scores(problem)}
    if job.settings.judge:
        names |= judged_rewards(problem, rewards)
    if problem.domain == "general":
        models = {"helpful": job.helpful_model, "safe": job.safe_model}
        names |= {name for name, model in models.items() if model}
    return names


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
