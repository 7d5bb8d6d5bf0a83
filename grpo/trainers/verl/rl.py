"""GRPO by verl: the same prompts in the same rollouts, this library's rewards, advantages and objective; verl's
sampling, processes and kernels."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.algorithms.advantages import ADVANTAGES
from grpo.config.jobs import RLJob
from grpo.config.rl_by_verl import updates_per_rollout
from grpo.config.trainers import Verl
from grpo.data.template import prompt_tokens
from grpo.errors import TrainingStopped
from grpo.health.base import HealthEvent
from grpo.health.checks import Health
from grpo.model.loading import load_tokenizer, save_tokenizer
from grpo.processes.metrics_log import COMPLETIONS, Metrics, write_result
from grpo.rl.batch import CompletionGroup
from grpo.rl.metrics import closing_metrics, metrics_of, samples_of
from grpo.rl.problem_order import make_orders, problems_of_rollout
from grpo.scoring.job_judge import judge_of
from grpo.scoring.scorer import Scorer
from grpo.trainers.verl.checkpoints import Checkpoints
from grpo.trainers.verl.model_input import folder_for_verl
from grpo.trainers.verl.overrides import overrides
from grpo.trainers.verl.plugins.prompts import write_prompts
from grpo.trainers.verl.processes import POLL_S, Machine, VerlProcess, check_environment, run_to_end
from grpo.trainers.verl.ray_cluster import ClusterPart, cluster
from grpo.trainers.verl.records import Records
from grpo.trainers.verl.rewards import RewardServer, Row
from grpo.trainers.verl.rl_settings import CHECKPOINTS, PROMPTS, REWARDS, rl_settings
from grpo.trainers.verl.settings import rate_share, saved_dtype

_NO_WAY_BACK = " (verl cannot be rolled back)"
logger = logging.getLogger(__name__)

NAMES = {
    "actor/loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/kl_loss": "kl",
    "actor/clipped_low": "clipped_low",
    "actor/clipped_high": "clipped_high",
    "actor/sampled_entropy": "sampled_entropy",
    "timing_s/gen": "sampling_s",
    "timing_s/update_actor": "update_s",
}
"""verl's names of what it measures -> ours."""


def train_rl(job: RLJob) -> None:
    """Trains a policy by GRPO with verl. On several machines, the first one leads; the others are parts of its Ray."""
    hardware = job.settings.hardware
    verl, machine = hardware.trainer, Machine.of_environment(hardware.nodes)
    assert verl is not None
    check_environment(verl)
    folder = job.state / "verl"
    folder.mkdir(exist_ok=True)
    ended = folder / f"ended-{machine.meeting}"
    with cluster(verl, machine, folder) as part:
        if machine.number == 0:
            _lead(job, verl, part, folder)
            ended.touch()
        while not ended.exists():  # the launcher ends this process if the first machine's fails
            part.check()
            time.sleep(POLL_S)


def _lead(job: RLJob, verl: Verl, part: ClusterPart, folder: Path) -> None:
    model = folder_for_verl(job.model, job.settings.hardware)
    tokenizer = load_tokenizer(str(model))
    rows = _rows(job, tokenizer)
    write_prompts(folder / PROMPTS, [row.problem.id for row in rows], [row.prompt for row in rows])
    training = _Training(job, verl, part, model, tokenizer, rows, folder)
    with _rewards(job, tokenizer, rows, folder / REWARDS, part.machine.host) as server:
        while training.done < job.settings.steps:
            training.run_segment(server)
    training.publish()


def _rows(job: RLJob, tokenizer: Any) -> list[Row]:
    """The prompts of all rollouts in the order in which this library's trainer would take them."""
    settings, orders = job.settings, make_orders(job)
    rows, prompts = [], dict[str, list[int]]()
    for step in range(0, settings.steps, updates_per_rollout(settings)):
        for problem in problems_of_rollout(orders, settings, step, settings.minibatches):
            if problem.id not in prompts:
                prompts[problem.id] = prompt_tokens(tokenizer, problem.messages, job.template, job.zero_template)
            rows.append(Row(problem, prompts[problem.id], settings.max_new_tokens(step)))
    return rows


@contextmanager
def _rewards(job: RLJob, tokenizer: Any, rows: list[Row], address: Path, host: str) -> Iterator[RewardServer]:
    settings = job.settings
    judge = judge_of(settings.judge, (row.problem for row in rows), job.state, 1)
    options = {name: term.options for name, term in settings.rewards.items()}
    scorer = Scorer(options, settings.scoring, None, judge)
    try:
        models = job.helpful_model, job.safe_model
        scorer.load_models(*models, settings.hardware, settings.uncertainty_penalty)
        server = RewardServer(job, tokenizer, scorer, rows, address, host)
        try:
            yield server
        finally:
            server.close()
    finally:
        scorer.close()


class _Training:
    """The runs of verl from the newest checkpoint to the last step.

    One run has one reference and one maximum length: at each step that changes either, verl ends with a checkpoint and
    a new run goes on.
    """

    def __init__(
        self, job: RLJob, verl: Verl, part: ClusterPart, model: Path, tokenizer: Any, rows: list[Row], folder: Path
    ):
        self.job, self.settings, self.verl, self.part = job, job.settings, verl, part
        self.model, self.tokenizer, self.rows, self.folder = model, tokenizer, rows, folder
        hardware = self.settings.hardware
        self.checkpoints = Checkpoints(folder / CHECKPOINTS, hardware, "actor")
        self.updates = updates_per_rollout(self.settings)
        self.metrics = Metrics(job.metrics, self.done)
        self.completions = Metrics(job.metrics.with_name(COMPLETIONS), self.done - 1)
        self.health, self.findings = Health(self.settings.health), list[dict[str, Any]]()
        for record in map(json.loads, job.metrics.read_text().splitlines()):  # of the runs before
            self._findings_of(record["step"], record)

    @property
    def done(self) -> int:
        """Optimizer steps of the newest checkpoint."""
        return self.checkpoints.newest() * self.updates

    def run_segment(self, server: RewardServer) -> None:
        """Runs verl up to the next step at which it needs other settings."""
        settings, done = self.settings, self.done
        end = self._end_of_segment(done)
        optimizer = settings.optimizer
        first_rate = optimizer.learning_rate * rate_share(done, settings.steps, optimizer)
        records = Records(self.folder / f"log-after-{done}-{self.part.machine.meeting}.jsonl", NAMES, first_rate)

        def hand_on() -> None:
            server.check()
            self.part.check()
            for rollout, values in records.new():
                self._log(rollout, values, server)

        longest = max(len(row.prompt) for row in self.rows)
        translated = rl_settings(self.job, self.folder, self._reference(done), longest, done, end)
        translated["+ray_kwargs.ray_init.runtime_env.env_vars"] = {**self.part.handed_on, **records.variables}
        translated["+ray_kwargs.ray_init.address"] = self.part.address
        driver = [str(self.verl.python), "-m", "grpo.trainers.verl.plugins.ray_driver"]
        place = [self.part.address, str(self.part.machine.count)]
        groups = ["model_engine=megatron"] if self.verl.megatron else []
        command = [*driver, *place, *groups, *overrides(translated), *self.verl.options]
        self.checkpoints.begin()
        run_to_end([VerlProcess("verl", "", command, self.part.environment)], hand_on)
        if self.done < end:
            raise TrainingStopped(f"verl ended well after {self.done} of {end} steps")

    def publish(self) -> None:
        """Writes the model and the result."""
        job = self.job
        self._publish_checkpoint(self.done, job.out)
        write_result(
            job.result,
            self.done,
            self.settings.steps,
            metrics=closing_metrics(job.metrics),
            findings=self.findings,
        )

    def _publish_checkpoint(self, step: int, out: Path) -> None:
        self.checkpoints.publish(step // self.updates, out, saved_dtype(self.settings.hardware), self.model)
        save_tokenizer(self.tokenizer, self.job.model, out)

    def _end_of_segment(self, done: int) -> int:
        settings = self.settings
        ends = [settings.steps]
        if refresh := settings.reference_refresh_steps:
            ends.append(done - done % refresh + refresh)
        starts = [-(-start // self.updates) * self.updates for start in settings.max_new_tokens_from]
        return min([*ends, *(start for start in starts if start > done)])

    def _reference(self, done: int) -> Path:
        """The folder of the reference for the steps from `done` on: the model at the last refresh."""
        refresh = self.settings.reference_refresh_steps
        if not refresh or done < refresh:
            return self.model
        references, step = self.folder / "references", done - done % refresh
        if not (kept := references / str(step)).exists():  # then `step` is the newest checkpoint's
            shutil.rmtree(references, ignore_errors=True)
            (partial := references / "partial").mkdir(parents=True)
            self._publish_checkpoint(step, partial)
            partial.rename(kept)
        return kept

    def _log(self, rollout: int, values: dict[str, float], server: RewardServer) -> None:
        """Logs the record of a rollout, counted from 1."""
        settings = self.settings
        step, begun = rollout * self.updates, (rollout - 1) * self.updates
        groups, failures = server.take(rollout - 1)
        tokens = sum(len(c.tokens) for group in groups for c in group.completions)
        rates = {
            "tokens_per_s": tokens / values["verl/timing_s/step"],
            **{name: values[name] / self.updates for name in ("sampling_s", "update_s")},
        }
        record = {**values, **metrics_of(groups, failures, server.weights), **rates}
        self.metrics.log(step, settings.steps, **record)
        if begun == 0 or begun // settings.samples_every != step // settings.samples_every:
            self._log_samples(groups[:2], begun)
        for event in self._findings_of(step, record):
            logger.warning("%s: %s", event.name, event.message)
            if event.action in ("stop", "roll_back"):
                raise TrainingStopped(f"{event.name}: {event.message}{_NO_WAY_BACK * (event.action == 'roll_back')}")

    def _findings_of(self, step: int, record: Mapping[str, Any]) -> list[HealthEvent]:
        events = self.health.check(step, record)
        self.findings += [{"step": event.step, "name": event.name, "message": event.message} for event in events]
        return events

    def _log_samples(self, groups: list[CompletionGroup], step: int) -> None:
        settings = self.settings
        advantages = [
            advantage.reshape(1)
            for group in groups
            for advantage in ADVANTAGES[settings.advantage](group.rewards[None], settings.std)[0]
        ]
        for sample in samples_of(groups, advantages, step):
            self.completions.log(**sample, of=settings.steps)
