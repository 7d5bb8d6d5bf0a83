"""The training loop: collect a rollout, update on its minibatches, log, check health, save (DSM algorithm 1 with R1's
schedule).

Everything that depends on the method is in `grpo.rl.method_table`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, fields
from typing import Any

import torch

from grpo.config.jobs import RLJob
from grpo.distributed import checkpoint
from grpo.distributed.process_group import Parallel
from grpo.errors import TrainingStopped
from grpo.generation.sampler import generator_for
from grpo.health.base import HealthEvent
from grpo.health.checks import Health
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.processes.metrics_log import COMPLETIONS, Metrics, write_result
from grpo.processes.save_clock import SaveClock
from grpo.processes.stop_request import StopRequest
from grpo.rl.batch import Rollout
from grpo.rl.collector import RolloutCollector
from grpo.rl.demonstrations import Demonstrations, GivenPairs
from grpo.rl.method_table import method_of
from grpo.rl.metrics import closing_metrics
from grpo.rl.model_set import Models
from grpo.rl.problem_order import make_orders
from grpo.rl.update import Update
from grpo.rl.validation import Validator
from grpo.scoring.job_judge import judge_of
from grpo.scoring.scorer import Scorer

logger = logging.getLogger(__name__)


@dataclass
class Pending:
    """A rollout and its remaining updates."""

    rollout: Rollout
    updates: list[list[int]]  # units of each update; inner epochs repeat them
    position: int
    sampling_s: float

    @property
    def done(self) -> bool:
        return self.position == len(self.updates)


class Trainer:
    """The RL loop of one job, from its last checkpoint to the saved policy."""

    def __init__(self, job: RLJob):
        self.job, self.settings = job, job.settings
        self.parallel = Parallel.start(job.settings.hardware)
        self.method = method_of(self.settings)
        self.scorer: Scorer | None = None
        self.orders = make_orders(job) if self.method.samples else {}
        if self.orders:  # the scorer's processes start while the models load
            options = {name: term.options for name, term in self.settings.rewards.items()}
            step_reward = self.settings.step_reward if self.settings.supervision == "process" else None
            orders = self.orders.values()
            asked = (problem for order in orders for source in order.sources.values() for problem in source)
            judge = judge_of(self.settings.judge, asked, job.state, self.parallel.world)
            self.scorer = Scorer(options, self.settings.scoring, step_reward, judge)
        torch.manual_seed(job.seed)
        self.tokenizer = load_tokenizer(job.model)
        self.models = Models(job.model, self.settings, self.method, self.parallel)
        self.update = Update(self.settings, self.method, self.models, self.parallel)
        self.collect = self._collector()
        self.validator = self._validator()
        self.health = Health(self.settings.health)
        self.step, self.saved, self.attempt = 0, -1, 0  # `saved`: step of the last checkpoint
        self.clock = SaveClock()
        self.pending: Pending | None = None
        self.findings: list[dict[str, Any]] = []
        if latest := self._latest():
            self._restore(*latest)
        self.metrics: Metrics | None = None
        self.completions: Metrics | None = None
        self._open_logs()

    def _collector(self) -> RolloutCollector | Demonstrations:
        if self.scorer is None:
            if self.method.source == "pairs":
                return GivenPairs(self.job, self.tokenizer, self.models)
            return Demonstrations(self.job, self.tokenizer)
        models = self.job.helpful_model, self.job.safe_model
        self.scorer.load_models(*models, self.settings.hardware, self.settings.uncertainty_penalty, self.parallel)
        return RolloutCollector(
            self.job, self.method, self.models, self.tokenizer, self.scorer, self.orders, self.parallel
        )

    def _validator(self) -> Validator | None:
        if self.settings.validate_every is None or isinstance(self.collect, Demonstrations):
            return None
        return Validator(self.job, self.collect, self.models, self.parallel)

    def _open_logs(self) -> None:
        """Opens the logs of metrics and completions, and drops entries logged after the step to resume from."""
        if self.parallel.is_main:
            self.metrics = Metrics(self.job.metrics, self.step)
            self.completions = Metrics(self.job.metrics.with_name(COMPLETIONS), self.step - 1)

    def _tensors(self) -> tuple[dict[str, torch.nn.Module], dict[str, torch.optim.Optimizer]]:
        return self.models.modules(), {"adamw": self.update.optimizer}

    def _latest(self) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest intact checkpoint."""
        needed = self.validator.selection.needed if self.validator else None
        return checkpoint.load_latest(self.parallel, self.job.state, *self._tensors(), needed)

    def run(self) -> None:
        try:
            with StopRequest() as request:
                while self._goes_on:
                    self._advance()
                    stops, due = self.parallel.any(request.asked), self.parallel.broadcast(self.clock.due)
                    if self._goes_on and (stops or due):
                        self._save_every(1)
                    if self._goes_on and stops:
                        request.end()
        finally:
            self.collect.close()
            if self.scorer is not None:
                self.scorer.close()
        result = {
            "metrics": closing_metrics(self.job.metrics) if self.parallel.is_main else {},
            "findings": self.findings,
        }
        if self.validator is not None:
            self.validator.selection.load(self.step)
            result["kept"] = kept = self.validator.selection.kept(self.settings.validation.metric)
            result["metrics"] |= kept.pop("metrics")
        self.models.policy.save(self.job.out)
        if self.parallel.is_main:
            save_tokenizer(self.tokenizer, self.job.model, self.job.out)
            planned = self.step if self._stopped else self.settings.steps
            write_result(self.job.result, self.step, planned, **result)
        self.parallel.close()

    @property
    def _stopped(self) -> bool:
        """Whether validation has ended training early."""
        return self.validator is not None and self.validator.selection.stops

    @property
    def _goes_on(self) -> bool:
        return self.step < self.settings.steps and not self._stopped

    def _advance(self) -> None:
        """Takes one optimizer step. Collects a new rollout first if the last is used up."""
        settings = self.settings
        if self.pending is None:
            self.pending = self._roll_out()
        pending, started = self.pending, time.perf_counter()
        rate = 0.5**self.attempt
        stats = self.update(pending.rollout, pending.updates[pending.position], self.step, rate)
        first = pending.position == 0
        pending.position += 1
        self.step += 1
        update_s = time.perf_counter() - started
        if self.validator is not None and self.validator.due(self.step):
            stats |= self.validator(self.step)
            stats["validation_s"] = time.perf_counter() - started - update_s
        record = self._log(pending, stats, update_s, first)
        if settings.reference_refresh_steps and self.step % settings.reference_refresh_steps == 0:
            self.models.refresh_reference()
        if pending.done:
            self.pending = None
        if self._act_on(self.health.check(self.step, record)):
            return
        self._save_every(settings.save_every)

    def _roll_out(self) -> Pending:
        settings, started = self.settings, time.perf_counter()
        left = settings.steps - self.step
        minibatches = self._minibatches(left)
        rollout = self.collect(self.step, minibatches, self.attempt)
        following = minibatches * settings.inner_epochs
        if settings.rollouts_ahead and following < left:
            assert isinstance(self.collect, RolloutCollector)
            self.collect.begin(self.step + following, self._minibatches(left - following), self.attempt)
        updates: list[list[int]] = []
        for epoch in range(settings.inner_epochs):
            generator = generator_for(self.job.seed, self.step, self.attempt, 1, epoch)
            order = torch.randperm(len(rollout.units), generator=generator).tolist()
            updates += [order[number::minibatches] for number in range(minibatches)]
        every = settings.samples_every
        shown = self.step == 0 or self.step // every != (self.step + following) // every
        if shown and self.completions is not None:
            for sample in rollout.samples:
                self.completions.log(**sample, of=settings.steps)
        rollout.samples = []
        return Pending(rollout, updates[:left], 0, time.perf_counter() - started)

    def _minibatches(self, steps_left: int) -> int:
        return min(self.settings.minibatches, -(-steps_left // self.settings.inner_epochs))

    def _log(self, pending: Pending, stats: dict[str, float], update_s: float, first: bool) -> dict[str, Any]:
        sampling_s = pending.sampling_s / len(pending.updates)
        tokens = sum(map(len, pending.rollout.completions)) / len(pending.updates)
        change = stats.pop("logprob_change_max", None)
        if "sampler_difference_max" in stats:
            if not self.settings.rollouts_ahead:
                stats["logprob_mismatch"] = stats["sampler_difference_max"]
        elif first and change is not None and self.method.online:
            # Later updates differ because the policy has changed, not because the sampler is inexact.
            stats["logprob_mismatch"] = change
        record = {
            **pending.rollout.metrics,
            **stats,
            "tokens_per_s": tokens / (sampling_s + update_s),
            "sampling_s": sampling_s,
            "update_s": update_s,
            "packed": float(self.models.packed),
        }
        record = self.parallel.broadcast(record)  # timings differ by process; all must decide alike
        if self.metrics is not None:
            self.metrics.log(self.step, self.settings.steps, **record)
        return record

    def _act_on(self, findings: list[HealthEvent]) -> bool:
        """Acts on health events. Returns whether the run was rolled back. Raises TrainingStopped if a check demands
        it."""
        for finding in findings:
            logger.warning("%s: %s", finding.name, finding.message)
            self.findings.append({"step": finding.step, "name": finding.name, "message": finding.message})
        actions = {finding.action: finding for finding in findings}
        if stop := actions.get("stop"):
            raise TrainingStopped(f"{stop.name}: {stop.message}")
        if back := actions.get("roll_back"):
            self._roll_back(back)
        return "roll_back" in actions

    def _roll_back(self, finding: HealthEvent) -> None:
        """Rolls back to the last good checkpoint. The run then samples different completions and halves the learning
        rate."""
        attempt, findings = self.attempt + 1, self.findings
        latest = self._latest()
        if latest is None or attempt > self.settings.health.max_roll_backs:
            why = "no checkpoint to roll back to" if latest is None else f"rolled back {self.attempt} times already"
            raise TrainingStopped(f"{finding.name}: {finding.message} ({why})")
        latest[1]["collect"].pop("begun", None)  # what the failed attempt has sampled
        self._restore(*latest)
        self.attempt, self.findings, self.pending = attempt, findings, None
        self._open_logs()
        logger.warning("rolled back to step %d, attempt %d", self.step, attempt + 1)

    def _save_every(self, steps: int) -> None:
        """Saves a checkpoint if the number of steps so far is a multiple of `steps`, unless the job is at its end, or
        in a state to which it should not return."""
        if self.step % steps == 0 and self._goes_on and self.health.good and self.saved != self.step:
            self._save()

    def _save(self) -> None:
        self.saved, pending = self.step, self.pending
        with self.clock.saving():
            payload: dict[str, Any] = {
                "rng": checkpoint.rng_state(),
                "collect": self.collect.state(),  # waits for a rollout in progress
                "health": self.health.state(),
                "attempt": self.attempt,
                "findings": self.findings,
                "pending": _plain(pending) | {"rollout": _plain(pending.rollout)} if pending else None,
                "validation": self.validator.selection.state() if self.validator else None,
            }
            checkpoint.save(self.parallel, self.job.state, self.step, *self._tensors(), payload)
        if self.validator is not None:
            self.validator.selection.saved()

    def _restore(self, step: int, payload: dict[str, Any]) -> None:
        self.step, self.saved, self.attempt = step, step, payload["attempt"]
        checkpoint.set_rng_state(payload["rng"])
        self.models.version += 1
        self.collect.restore(payload["collect"])
        self.health.restore(payload["health"])
        self.findings = payload["findings"]
        if self.validator is not None:
            self.validator.selection.restore(payload.get("validation"))
        pending = payload["pending"]
        self.pending = Pending(**(pending | {"rollout": Rollout(**pending["rollout"])})) if pending else None


def _plain(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def train_rl(job: RLJob) -> None:
    """Runs an RL job."""
    Trainer(job).run()
