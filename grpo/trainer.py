"""GRPO: roll out, score, compare within groups, update (DSM algorithm 1, R1 schedule).

Departures from the paper: old log-probabilities are the sampler's own (it is the policy itself, in this process);
the difference to the trainer's is measured each rollout as `logprob_mismatch`.
"""

from __future__ import annotations

import functools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo import checkpoint
from grpo.advantages import group_advantages, zero_variance_share
from grpo.config import GRPOJob
from grpo.data import Problem, read_problems
from grpo.errors import InputError
from grpo.objective import grpo_loss
from grpo.optimizer import learning_rate_share, make_optimizer
from grpo.policy import (
    choose_device,
    completion_logprobs,
    load_policy,
    load_tokenizer,
    micro_batches,
    save_tokenizer,
)
from grpo.rewards import total
from grpo.rollout import Completion, generator_for, sample
from grpo.runlog import Metrics, write_result
from grpo.scoring import Scorer
from grpo.template import parse, prompt_tokens


@dataclass
class Rollout:
    """Groups of completions with their rewards and advantages; the lists run over sequences, group by group."""

    problems: list[Problem]  # one a sequence
    prompts: list[list[int]]
    completions: list[Completion]
    texts: list[str]
    breakdowns: list[dict[str, float]]
    rewards: torch.Tensor  # [P, G]
    advantages: torch.Tensor  # [P * G]


class ProblemOrder:
    """Which problems a step asks: each pass over a pool is a permutation of its own, fixed by the seed, so that the
    order needs no state to resume from."""

    def __init__(self, problems: Sequence[Problem], seed: int):
        self.problems, self.seed = problems, seed

    def take(self, start: int, count: int) -> list[Problem]:
        return [self._at(position) for position in range(start, start + count)]

    def _at(self, position: int) -> Problem:
        epoch, index = divmod(position, len(self.problems))
        return self.problems[self._order(epoch)[index]]

    @functools.lru_cache(maxsize=2)  # noqa: B019  # one object a job, and it lives as long as the job
    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


class Trainer:
    def __init__(self, job: GRPOJob):
        self.job, self.settings = job, job.settings
        problems = read_problems(job.problems)
        self.pools = {
            domain: ProblemOrder(pool, job.seed)
            for domain in ("reasoning", "general")
            if (pool := [p for p in problems if p.domain == domain])
        }
        self._check_pools()
        hardware = self.settings.hardware
        torch.manual_seed(job.seed)
        self.device = choose_device(hardware)
        self.tokenizer = load_tokenizer(job.model)
        self.policy = load_policy(job.model, hardware)
        # Without a penalty nothing reads the reference: a second model would only take memory.
        self.reference = load_policy(job.model, hardware).requires_grad_(False) if self.settings.kl_coef else None
        self.scorer = Scorer(job.helpful_model, job.safe_model, hardware)
        self.optimizer = make_optimizer(self.policy.parameters(), self.settings.optimizer)
        self.step = 0
        self.samples: list[dict[str, Any]] = []
        if found := checkpoint.load_latest(job.state):
            self._restore(*found)
        self.metrics = Metrics(job.metrics, self.step)

    def _check_pools(self) -> None:
        needed = ["reasoning"] if self.settings.general_share < 1 or self._general_from() > 0 else []
        needed += ["general"] if self.settings.general_last_steps else []
        for domain in needed:
            if domain not in self.pools:
                raise InputError(f"{self.job.problems[0]}: no {domain} problems here, but this job trains on them")

    def _general_from(self) -> int:
        return self.settings.steps - self.settings.general_last_steps

    def run(self) -> None:
        settings = self.settings
        while self.step < settings.steps:
            minibatches = min(settings.minibatches, settings.steps - self.step)
            started = time.perf_counter()
            rollout = self.roll_out(minibatches)
            sampling_s = time.perf_counter() - started
            if self.step // settings.samples_every != (self.step + minibatches) // settings.samples_every:
                self._keep_samples(rollout)
            order = torch.randperm(
                len(rollout.completions), generator=generator_for(self.job.seed, self.step, 1)
            ).tolist()
            size = len(order) // minibatches
            for number in range(minibatches):
                started = time.perf_counter()
                stats = self.update(rollout, order[number * size : (number + 1) * size], measure=number == 0)
                self.step += 1
                self._log(rollout, stats, sampling_s / minibatches, time.perf_counter() - started, minibatches)
                if settings.reference_refresh_steps and self.step % settings.reference_refresh_steps == 0:
                    self._refresh_reference()
            # Only between rollouts: a checkpoint then needs no half-used rollout inside it.
            due = self.step // settings.save_every != (self.step - minibatches) // settings.save_every
            if due and self.step < settings.steps:
                self._save()
        self.policy.save_pretrained(self.job.out)
        save_tokenizer(self.tokenizer, self.job.model, self.job.out)
        write_result(
            self.job.result, self.step, settings.steps, metrics=closing_means(self.job.metrics), samples=self.samples
        )

    def roll_out(self, minibatches: int) -> Rollout:
        settings = self.settings
        problems = self._problems_for(minibatches)
        prompts = [
            prompt_tokens(self.tokenizer, p.messages, self.job.template, self.job.zero_template) for p in problems
        ]
        groups = sample(
            self.policy,
            prompts,
            settings.group_size,
            settings.sampling,
            pad_id=self.tokenizer.pad_token_id,
            eos_id=self.tokenizer.eos_token_id,
            generator=generator_for(self.job.seed, self.step, 0),
        )
        completions = [completion for group in groups for completion in group]
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
        repeated = [p for p in problems for _ in range(settings.group_size)]
        breakdowns = self.scorer(repeated, [parse(text) for text in texts], texts)
        rewards = torch.tensor([total(b, settings.rewards) for b in breakdowns]).view(len(problems), -1)
        return Rollout(
            problems=repeated,
            prompts=[p for p in prompts for _ in range(settings.group_size)],
            completions=completions,
            texts=texts,
            breakdowns=breakdowns,
            rewards=rewards,
            advantages=group_advantages(rewards).flatten(),
        )

    def _problems_for(self, minibatches: int) -> list[Problem]:
        """General prompts join in the last steps only; counting what each pool gave keeps the order stateless."""
        settings = self.settings
        chosen: list[Problem] = []
        for step in range(self.step, self.step + minibatches):
            share = settings.general_share if step >= self._general_from() else 0.0
            general = math.ceil(settings.prompts_per_step * share)
            reasoning = settings.prompts_per_step - general
            if reasoning:
                chosen += self.pools["reasoning"].take(step * settings.prompts_per_step, reasoning)
            if general:
                chosen += self.pools["general"].take((step - self._general_from()) * general, general)
        return chosen

    def update(self, rollout: Rollout, indices: list[int], *, measure: bool) -> dict[str, float]:
        """One optimizer step on the sequences `indices` of the rollout."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = settings.optimizer.learning_rate * learning_rate_share(
                self.step, settings.steps, settings.optimizer
            )
        sums: dict[str, float] = {}
        mismatch = 0.0
        lengths = [len(rollout.prompts[i]) + len(rollout.completions[i].tokens) for i in indices]
        self.policy.train()
        for batch in micro_batches(lengths, settings.micro_batch_tokens):
            rows = [indices[j] for j in batch]
            prompts = [rollout.prompts[i] for i in rows]
            tokens = [rollout.completions[i].tokens for i in rows]
            logprobs = completion_logprobs(self.policy, prompts, tokens, settings.sampling.temperature)
            old, mask = self._old_logprobs([rollout.completions[i] for i in rows], logprobs)
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = completion_logprobs(self.reference, prompts, tokens, settings.sampling.temperature)
            loss, stats = grpo_loss(
                logprobs,
                old,
                reference,
                rollout.advantages[rows].to(self.device),
                mask,
                clip_eps_low=settings.clip_eps_low,
                clip_eps_high=settings.clip_eps_high,
                kl_coef=settings.kl_coef,
            )
            (loss / len(indices)).backward()
            stats["loss"] = loss.detach()
            stats["entropy"] = -((logprobs * mask).sum(1) / mask.sum(1).clamp(min=1)).sum().detach()
            for name, value in stats.items():
                sums[name] = sums.get(name, 0.0) + value.item()
            mismatch = max(mismatch, ((logprobs - old) * mask).abs().max().item())
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), settings.optimizer.max_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"step {self.step + 1}: the gradient is not finite; lower the learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.eval()
        means = {name: value / len(indices) for name, value in sums.items()}
        if measure:  # later minibatches differ because the policy moved, not because the sampler is off
            means["logprob_mismatch"] = mismatch
        return {**means, "grad_norm": norm.item()}

    def _old_logprobs(self, completions: list[Completion], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        old, mask = torch.zeros_like(like), torch.zeros_like(like)
        for row, completion in enumerate(completions):
            old[row, : len(completion.tokens)] = torch.tensor(completion.logprobs, device=like.device)
            mask[row, : len(completion.tokens)] = 1
        return old, mask

    def _log(
        self, rollout: Rollout, stats: dict[str, float], sampling_s: float, update_s: float, minibatches: int
    ) -> None:
        tokens = [len(c.tokens) for c in rollout.completions]
        parts = {name for b in rollout.breakdowns for name in b}
        self.metrics.log(
            self.step,
            self.settings.steps,
            reward=rollout.rewards.mean().item(),
            **{f"reward_{n}": _mean([b[n] for b in rollout.breakdowns if n in b]) for n in sorted(parts)},
            zero_variance_share=zero_variance_share(rollout.rewards),
            completion_tokens=_mean(tokens),
            truncated_share=_mean([not c.finished for c in rollout.completions]),
            learning_rate=self.optimizer.param_groups[0]["lr"],
            tokens_per_s=sum(tokens) / minibatches / (sampling_s + update_s),
            sampling_s=sampling_s,
            update_s=update_s,
            **stats,
        )

    def _keep_samples(self, rollout: Rollout) -> None:
        for i in range(0, min(len(rollout.texts), 2 * self.settings.group_size)):
            self.samples.append(
                {
                    "step": self.step,
                    "problem": rollout.problems[i].text,
                    "gold": rollout.problems[i].answer,
                    "completion": rollout.texts[i],
                    "reward": rollout.rewards.flatten()[i].item(),
                    "advantage": rollout.advantages[i].item(),
                    **rollout.breakdowns[i],
                }
            )

    def _refresh_reference(self) -> None:
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())

    def _save(self) -> None:
        payload: dict[str, Any] = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "samples": self.samples,
        }
        if self.settings.reference_refresh_steps and self.reference is not None:
            payload["reference"] = self.reference.state_dict()
        checkpoint.save(self.job.state, self.step, payload)

    def _restore(self, step: int, payload: dict[str, Any]) -> None:
        self.step = step
        self.policy.load_state_dict(payload["policy"])
        self.optimizer.load_state_dict(payload["optimizer"])
        if self.reference is not None and "reference" in payload:
            self.reference.load_state_dict(payload["reference"])
        self.samples = payload["samples"]


def closing_means(metrics: Path, last: int = 10) -> dict[str, float]:
    """Means over the last steps of a run: single steps are noisy."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()][-last:]
    names = [n for n in records[-1] if n.startswith("reward") or n in ("kl", "entropy", "completion_tokens")]
    return {name: _mean([r[name] for r in records if name in r]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def train_grpo(job: GRPOJob) -> None:
    Trainer(job).run()
