"""Making experience: ask problems, sample groups, score them while sampling goes on, give credit (DSM algorithm 1).

Departures from the paper: old log-probabilities are the sampler's own (it is the policy itself, in this process); the
difference to the trainer's is measured each rollout as `logprob_mismatch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.advantages import zero_variance_groups
from grpo.credit import CREDITS, Scored, Step
from grpo.data import Problem
from grpo.experience import Rollout
from grpo.jobs import RLJob
from grpo.logprobs import completion_logprobs, micro_batches
from grpo.methods import Method
from grpo.models import Models
from grpo.pool import Failure
from grpo.problem_order import ProblemOrder
from grpo.rewards import MODEL_REWARDS, Response, total
from grpo.rollout import Completion, generator_for, sample_batches
from grpo.scoring import Failures, Scorer
from grpo.steps import step_rewards
from grpo.template import parse, prompt_tokens

PerToken = Callable[[list[list[int]], list[list[int]]], Tensor]
"""(prompts, completions) -> a number for each completion token, [B, C]."""


@dataclass
class Group:
    """One problem and its scored completions; a list runs over the completions."""

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    responses: list[Response]
    breakdowns: list[dict[str, float]]
    rewards: Tensor  # [G]
    steps: list[list[Step]] | None


class Collector:
    """Makes rollouts for one job."""

    def __init__(
        self,
        job: RLJob,
        method: Method,
        models: Models,
        tokenizer: Any,
        scorer: Scorer,
        pools: dict[str, ProblemOrder],
    ):
        self.job, self.settings, self.method, self.models = job, job.settings, method, models
        self.tokenizer, self.scorer, self.pools = tokenizer, scorer, pools
        # A reward model that the recipe gives no weight is shown in the metrics all the same.
        self.weights = dict.fromkeys(MODEL_REWARDS, 0.0)
        self.weights |= {name: term.weight for name, term in self.settings.rewards.items()}
        self.credit = CREDITS[method.credit]
        # Offline data is fitted as it is; online, the ratio is between policies at the sampling temperature.
        self.temperature = self.settings.sampling.temperature if method.data == "policy" else 1.0

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        """A rollout for updates that begin at `step`; another `attempt` draws other completions."""
        problems = self._problems_for(step, minibatches)
        groups, failures = self._sample_and_score(problems, step, (step, attempt, 0))
        replaced = 0
        for number in range(1, self.settings.dynamic_sampling_rounds + 1):
            flat = zero_variance_groups(torch.stack([g.rewards for g in groups])).nonzero().flatten().tolist()
            if not flat:
                break
            asked = [self.pools[groups[i].problem.domain].take(1)[0] for i in flat]
            fresh, more = self._sample_and_score(asked, step, (step, attempt, number))
            for i, group in zip(flat, fresh, strict=True):
                groups[i] = group
            failures.add(more)
            replaced += len(flat)
        for group in groups:
            if "accuracy" in group.breakdowns[0]:
                pass_rate = _mean([b["accuracy"] for b in group.breakdowns])
                self.pools[group.problem.domain].observe(group.problem, pass_rate)
        rollout = self._with_credit(groups)
        rollout.metrics = self._metrics(groups, failures) | {"replaced_groups": float(replaced)}
        rollout.samples = self._samples(groups[:2], rollout, step)
        return rollout

    def _problems_for(self, step: int, minibatches: int) -> list[Problem]:
        """General prompts join in the last steps only (R1, stage 4)."""
        settings = self.settings
        chosen: list[Problem] = []
        for number in range(step, step + minibatches):
            share = settings.general_share if number >= settings.steps - settings.general_last_steps else 0.0
            general = math.ceil(settings.prompts_per_step * share)
            if reasoning := settings.prompts_per_step - general:
                chosen += self.pools["reasoning"].take(reasoning)
            if general:
                chosen += self.pools["general"].take(general)
        return chosen

    def _sample_and_score(
        self, problems: Sequence[Problem], step: int, draw: tuple[int, ...]
    ) -> tuple[list[Group], Failures]:
        settings = self.settings
        sampling = settings.sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens(step)})
        prompts = [
            prompt_tokens(self.tokenizer, p.messages, self.job.template, self.job.zero_template) for p in problems
        ]
        groups: dict[int, Callable[[], tuple[Group, Failures]]] = {}
        with self.models.sampler() as model:
            for index, completions in sample_batches(
                model,
                prompts,
                settings.group_size,
                sampling,
                pad_id=self.tokenizer.pad_token_id,
                eos_id=self.tokenizer.eos_token_id,
                generator=generator_for(self.job.seed, *draw),
            ):
                # Scoring goes on in other processes while the next batch is sampled.
                groups[index] = self._score(problems[index], prompts[index], completions, sampling.max_new_tokens)
        finished = [groups[i]() for i in range(len(problems))]
        failures = Failures()
        for _, counted in finished:
            failures.add(counted)
        failures.stop_above(settings.scoring.max_failure_share)
        return [group for group, _ in finished], failures

    def _score(
        self, problem: Problem, prompt: list[int], completions: list[Completion], max_tokens: int
    ) -> Callable[[], tuple[Group, Failures]]:
        """Begin to score a group; what is returned waits for the end."""
        texts = self.tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
        responses = [
            Response(text, parse(text), len(c.tokens), c.finished, max_tokens)
            for text, c in zip(texts, completions, strict=True)
        ]
        scores = self.scorer.start([problem] * len(responses), responses)
        by_step = self._start_steps(problem, texts) if self.settings.supervision == "process" else None

        def finish() -> tuple[Group, Failures]:
            breakdowns, failures = scores.finish()
            rewards = torch.tensor([total(b, self.weights) for b in breakdowns])
            steps = None
            if by_step is not None:
                steps = [
                    self._token_steps(f, c, r) for f, c, r in zip(by_step, completions, rewards.tolist(), strict=True)
                ]
            return Group(problem, prompt, completions, responses, breakdowns, rewards, steps), failures

        return finish

    def _start_steps(self, problem: Problem, texts: list[str]) -> list[Future[Any]]:
        return [self.scorer.pool.submit(step_rewards, self.settings.step_reward, problem, text) for text in texts]

    def _token_steps(self, future: Future[Any], completion: Completion, outcome: float) -> list[Step]:
        """Steps by the token that ends them; the completion's end is the last step and carries the outcome, scaled to
        the 0..1 of the others. A step reward that failed leaves the outcome alone."""
        found = future.result()
        scale = sum(abs(w) for w in self.weights.values()) or 1.0
        steps = (
            []
            if isinstance(found, Failure)
            else [(self._token_at(completion.tokens, end), reward) for end, reward in found]
        )
        return [*steps, (len(completion.tokens) - 1, outcome / scale)]

    def _token_at(self, tokens: list[int], characters: int) -> int:
        """Index of the token with which the decoded text first holds so many characters."""
        low, high = 0, len(tokens) - 1
        while low < high:
            middle = (low + high) // 2
            if len(self.tokenizer.decode(tokens[: middle + 1], skip_special_tokens=True)) >= characters:
                high = middle
            else:
                low = middle + 1
        return low

    def _with_credit(self, groups: list[Group]) -> Rollout:
        prompts = [g.prompt for g in groups for _ in g.completions]
        sampled = [c for g in groups for c in g.completions]
        tokens = [c.tokens for c in sampled]
        ref_logprobs = values = None
        if self.method.needs_reference(self.settings):
            with self.models.reference() as reference:
                ref_logprobs = self._measure(
                    lambda p, c: completion_logprobs(reference, p, c, self.temperature), prompts, tokens
                )
        if self.models.value is not None:
            values = self._measure(self.models.value, prompts, tokens)
        breakdowns = [b for g in groups for b in g.breakdowns]
        rewards = torch.stack([g.rewards for g in groups])
        best = (rewards > rewards.mean(1, keepdim=True)).flatten().tolist()
        scored = Scored(
            rewards=rewards,
            # Where no rule decides, RFT keeps what is better than its group.
            right=[b.get("accuracy", float(better)) == 1.0 for b, better in zip(breakdowns, best, strict=True)],
            lengths=[len(t) for t in tokens],
            steps=[s for g in groups for s in g.steps or []] if groups[0].steps is not None else None,
            logprobs=[torch.tensor(c.logprobs) for c in sampled],
            ref_logprobs=ref_logprobs,
            values=values,
        )
        credit = self.credit(scored, self.settings)
        return Rollout(
            prompts=prompts,
            completions=tokens,
            advantages=credit.advantages,
            old_logprobs=[torch.tensor(c.logprobs) for c in sampled],
            ref_logprobs=ref_logprobs,
            old_values=values,
            returns=credit.returns,
            learnt=[c.finished or not self.settings.mask_truncated for c in sampled],
            units=credit.units if credit.units is not None else [[i] for i in range(len(tokens))],
            metrics={},
        )

    @torch.no_grad()
    def _measure(self, of: PerToken, prompts: list[list[int]], tokens: list[list[int]]) -> list[Tensor]:
        """A number for each completion token, [T] a sequence, computed in micro-batches."""
        results: dict[int, Tensor] = {}
        lengths = [len(p) + len(t) for p, t in zip(prompts, tokens, strict=True)]
        for batch in micro_batches(lengths, self.settings.micro_batch_tokens):
            table = of([prompts[i] for i in batch], [tokens[i] for i in batch]).float().cpu()
            results |= {i: row[: len(tokens[i])].clone() for i, row in zip(batch, table, strict=True)}
        return [results[i] for i in range(len(tokens))]

    def _metrics(self, groups: list[Group], failures: Failures) -> dict[str, float]:
        rewards = torch.stack([g.rewards for g in groups])
        completions = [c for g in groups for c in g.completions]
        metrics = {"reward": rewards.mean().item()} | _component_means("reward_", groups)
        domains = {g.problem.domain for g in groups}
        for domain in sorted(domains) if len(domains) > 1 else []:
            of_domain = [g for g in groups if g.problem.domain == domain]
            metrics[f"{domain}_reward"] = _mean([r for g in of_domain for r in g.rewards.tolist()])
            metrics |= _component_means(f"{domain}_reward_", of_domain)
        return metrics | {
            "zero_variance_share": zero_variance_groups(rewards).float().mean().item(),
            "completion_tokens": _mean([len(c.tokens) for c in completions]),
            "truncated_share": _mean([not c.finished for c in completions]),
            "reward_failures": float(failures.kinds.total()),
            **{f"reward_failures_{kind}": float(count) for kind, count in sorted(failures.kinds.items())},
        }

    def _samples(self, groups: list[Group], rollout: Rollout, step: int) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for group in groups:
            for response, breakdown, reward in zip(
                group.responses, group.breakdowns, group.rewards.tolist(), strict=True
            ):
                kept.append(
                    {
                        "step": step,
                        "problem": group.problem.text,
                        "gold": group.problem.answer,
                        "completion": response.text,
                        "reward": reward,
                        "advantage": rollout.advantages[len(kept)][0].item(),
                        **breakdown,
                    }
                )
        return kept


def _component_means(prefix: str, groups: list[Group]) -> dict[str, float]:
    breakdowns = [b for g in groups for b in g.breakdowns]
    names = sorted({name for b in breakdowns for name in b})
    return {prefix + name: _mean([b[name] for b in breakdowns if name in b]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
