"""Validation while a policy learns: samples on problems of its own, the best weights so far, and when to stop.

The best weights are kept on disk alone. They outlive every checkpoint that refers to them, so that a killed or rolled
back job finds those that it knew of.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo.config.jobs import RLJob
from grpo.config.validation import REWARD
from grpo.data.records import Problem, read_problems
from grpo.distributed import checkpoint
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.rewards.registry import MODEL_REWARDS, find, total
from grpo.rl.collector import RolloutCollector
from grpo.rl.model_set import Models
from grpo.scoring.scorer import Failures

PREFIX = "validation/"
"""Of the metrics' names."""
_DRAW = (2**32,)
"""All validations draw with the same seeds, which no rollout uses: what differs between them is the policy."""
_BEST = "best-"


@dataclass
class Best:
    """The best validation so far; part of every checkpoint, field by field."""

    step: int = 0  # 0: none yet
    value: float = -math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    since: int = 0  # validations after it

    def observe(self, step: int, value: float, metrics: dict[str, float]) -> bool:
        """Whether this one is better than all before. Equal is not, and nor is what is no number."""
        if math.isfinite(value) and value > self.value:
            self.step, self.value, self.metrics, self.since = step, value, metrics, 0
            return True
        self.since += 1
        return False


class Validator:
    """Validations of one job."""

    def __init__(self, job: RLJob, collect: RolloutCollector, models: Models, parallel: Parallel):
        self.job, self.settings, self.choice = job, job.settings, job.settings.validation
        self.collect, self.models, self.parallel = collect, models, parallel
        self.problems = validation_problems(job, [*collect.orders])
        _check_metric(job, {problem.domain for problem in self.problems})
        self.best = Best()
        self.latest: tuple[int, dict[str, float]] = 0, {}
        self._in_checkpoint = 0  # step of the best weights that the last checkpoint knows

    @property
    def stops(self) -> bool:
        """Whether patience has run out."""
        return self.choice.patience is not None and self.best.since >= self.choice.patience

    def due(self, step: int) -> bool:
        assert self.settings.validate_every is not None
        return step % self.settings.validate_every == 0 or step == self.settings.steps

    def __call__(self, step: int) -> dict[str, float]:
        """Metrics of the policy after `step`. Saves its weights if they are the best so far. All processes call it
        together."""
        metrics = self._measure(step)
        self.latest = step, metrics
        if self.best.observe(step, metrics[PREFIX + self.choice.metric], metrics) and self.settings.keep == "best":
            checkpoint.save_weights(self.parallel, self._folder(step), self._modules())
            self._clean()
        return metrics

    def kept(self) -> dict[str, Any]:
        """The checkpoint that the job gives: its step, the metric, its value there, and all metrics there."""
        step, metrics = (self.best.step, self.best.metrics) if self.settings.keep == "best" else self.latest
        name = self.choice.metric
        return {"step": step, "metric": name, "value": metrics.get(PREFIX + name), "metrics": metrics}

    def load_kept(self, step: int) -> None:
        """Puts the best weights in the place of those after `step`, if they are to be kept."""
        if self.settings.keep == "best" and self.best.step not in (0, step):
            checkpoint.load_weights(self._folder(self.best.step), self._modules())

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"best": asdict(self.best), "latest": list(self.latest)}

    def saved(self) -> None:
        """Says that a checkpoint has the present state: best weights that only older ones knew are deleted."""
        self._in_checkpoint = self.best.step
        self._clean()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state`; None, of a checkpoint without validations, begins anew."""
        self.best, self.latest = Best(), (0, {})
        if state is not None:
            self.best, self.latest = Best(**state["best"]), tuple(state["latest"])
        self._in_checkpoint = self.best.step

    def _measure(self, step: int) -> dict[str, float]:
        choice, weights = self.choice, self.collect.weights
        self.collect.wait()  # the engine is in use for the next rollout
        request = self.collect.prefetcher.sample(
            self.problems, step, _DRAW, sampling=choice.sampling, completions=choice.samples_per_problem
        )
        failures, mine = Failures(), dict[int, list[dict[str, float]]]()
        for number, (completions, scores) in request.results.result().items():
            scored = scores.finish()
            failures.add(scored.failures)
            lengths = [{"tokens": float(len(c.tokens)), "truncated": float(not c.finished)} for c in completions]
            rewards = [{REWARD: total(breakdown, weights), **breakdown} for breakdown in scored.breakdowns]
            mine[number] = [
                {**of_rewards, **{f"completion_{name}": value for name, value in of_length.items()}}
                for of_rewards, of_length in zip(rewards, lengths, strict=True)
            ]
        measured: dict[int, list[dict[str, float]]] = {}
        for share, failed in self.parallel.all_gather((mine, failures)):
            measured |= share
            if failed is not failures:
                failures.add(failed)
        failures.stop_above(self.settings.scoring.max_failure_share)
        # In the order of the problems, so that sums do not depend on the number of processes.
        rows = [row for number in sorted(measured) for row in measured[number]]
        names = sorted({name for row in rows for name in row})
        return {PREFIX + name: _mean([row[name] for row in rows if name in row]) for name in names}

    def _folder(self, step: int) -> Any:
        return self.job.state / f"{_BEST}{step:08d}"

    def _modules(self) -> dict[str, Any]:
        return {"policy": self.models.policy}

    def _clean(self) -> None:
        kept = {self._folder(step) for step in (self.best.step, self._in_checkpoint)}
        if self.parallel.is_main:
            for folder in set(self.job.state.glob(f"{_BEST}*")) - kept:
                shutil.rmtree(folder)
        self.parallel.barrier()


def validation_problems(job: RLJob, domains: Sequence[str]) -> list[Problem]:
    """The first validation problems of each of the domains that are trained on.

    Raises InputError for a domain without any, and for one that is trained on, too.
    """
    problems = read_problems(job.validation_problems)
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


def _check_metric(job: RLJob, domains: set[str]) -> None:
    """Raises InputError where no validation problem has the metric that checkpoints are chosen by."""
    models = {"helpful": job.helpful_model, "safe": job.safe_model}
    measured = [REWARD]
    measured += [n for n in job.settings.rewards if n not in MODEL_REWARDS and domains & set(find(n).domains)]
    measured += [name for name, model in models.items() if model and "general" in domains]
    if (metric := job.settings.validation.metric) not in measured:
        raise InputError(
            f"validation.metric {metric!r} is not measured on {' and '.join(sorted(domains))} problems; choose from "
            f"{', '.join(measured)}"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
