"""Making experience: ask problems, sample groups, score them while sampling goes on, give credit (DSM algorithm 1).

Departures from the paper: old log-probabilities are the sampler's own (it is the policy itself, in this process); the
difference to the trainer's is measured each rollout as `logprob_mismatch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo.advantages import zero_variance_groups
from grpo.credit import CREDITS, Evidence, Step
from grpo.data import Problem
from grpo.experience import Rollout
from grpo.groups import Group, metrics_of, samples_of
from grpo.jobs import RLJob
from grpo.logprobs import completion_logprobs
from grpo.methods import Method
from grpo.models import Models
from grpo.packing import micro_batches
from grpo.parallel import Parallel, divide
from grpo.problem_order import ProblemOrder
from grpo.rewards import MODEL_REWARDS, total
from grpo.rollout import Completion, sample_groups, seed_of
from grpo.scoring import Failures, Scorer, Scores, responses_of
from grpo.template import prompt_tokens
from grpo.value import values_of

T = TypeVar("T")
PerToken = Callable[[list[list[int]], list[list[int]]], Tensor]
"""(prompts, completions) -> a number for each completion token, [B, C]."""


class Collector:
    """Makes rollouts for one job."""

    def __init__(
        self,
        job: RLJob,
        method: Method,
        models: Models,
        tokenizer: Any,
        scorer: Scorer,
        orders: dict[str, ProblemOrder],
        parallel: Parallel,
    ):
        self.parallel = parallel
        self.job, self.settings, self.method, self.models = job, job.settings, method, models
        self.tokenizer, self.scorer, self.orders = tokenizer, scorer, orders
        # A reward model that the recipe gives no weight is shown in the metrics all the same.
        self.weights = dict.fromkeys(MODEL_REWARDS, 0.0)
        self.weights |= {name: term.weight for name, term in self.settings.rewards.items()}
        self.credit = CREDITS[method.credit]
        self.temperature = method.temperature(self.settings)

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        """A rollout for updates that begin at `step`; another `attempt` draws other completions."""
        problems = self._problems_for(step, minibatches)
        groups, failures = self._sample_and_score(problems, step, (step, attempt, 0))
        replaced = 0
        for number in range(1, self.settings.dynamic_sampling_rounds + 1):
            flat = zero_variance_groups(torch.stack([g.rewards for g in groups])).nonzero().flatten().tolist()
            if not flat:
                break
            asked = [self.orders[groups[i].problem.domain].take(1)[0] for i in flat]
            fresh, more = self._sample_and_score(asked, step, (step, attempt, number))
            for i, group in zip(flat, fresh, strict=True):
                groups[i] = group
            failures.add(more)
            replaced += len(flat)
        rollout = self._with_credit(groups)
        rollout.metrics = metrics_of(groups, failures) | {"replaced_groups": float(replaced)}
        rollout.samples = samples_of(groups[:2], rollout.advantages, step)
        return rollout

    def _problems_for(self, step: int, minibatches: int) -> list[Problem]:
        """General prompts join in the last steps only (R1, stage 4)."""
        settings = self.settings
        chosen: list[Problem] = []
        for number in range(step, step + minibatches):
            share = settings.general_share if number >= settings.steps - settings.general_last_steps else 0.0
            general = math.ceil(settings.prompts_per_step * share)
            if reasoning := settings.prompts_per_step - general:
                chosen += self.orders["reasoning"].take(reasoning)
            if general:
                chosen += self.orders["general"].take(general)
        return chosen

    def _sample_and_score(
        self, problems: Sequence[Problem], step: int, draw: tuple[int, ...]
    ) -> tuple[list[Group], Failures]:
        """Each process does its share of the problems, and all get all groups, in the order of the problems."""
        prompts = [
            prompt_tokens(self.tokenizer, p.messages, self.job.template, self.job.zero_template) for p in problems
        ]
        shares = divide([len(p) + self.settings.max_new_tokens(step) for p in prompts], self.parallel.world)
        mine = shares[self.parallel.rank]
        seeds = [seed_of(self.job.seed, *draw, number) for number in mine]
        done = self._do_share([problems[i] for i in mine], [prompts[i] for i in mine], seeds, step)
        failures, of_problem = Failures(), dict[int, Group]()
        for share, (groups, failed) in zip(shares, self.parallel.gather(done), strict=True):
            of_problem |= zip(share, groups, strict=True)
            failures.add(failed)
        failures.stop_above(self.settings.scoring.max_failure_share)
        found = [of_problem[i] for i in range(len(problems))]
        for group in found:
            self._observe(group)
        return found, failures

    def _do_share(
        self, problems: list[Problem], prompts: list[list[int]], seeds: list[int], step: int
    ) -> tuple[list[Group], Failures]:
        settings = self.settings
        sampling = settings.sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens(step)})
        sampled: dict[int, list[Completion]] = {}
        scores: dict[int, Scores] = {}
        with self.models.sampler() as model:
            for index, completions in sample_groups(
                model,
                prompts,
                settings.group_size,
                sampling,
                eos_id=self.tokenizer.eos_token_id,
                seeds=seeds,
            ):
                # Scoring goes on in other processes while other groups are sampled and the models measure.
                responses = responses_of(self.tokenizer, completions, sampling.max_new_tokens)
                scores[index] = self.scorer.start(problems[index], responses)
                sampled[index] = completions
        tokens = [[c.tokens for c in sampled[i]] for i in range(len(problems))]
        ref_logprobs, values = self._reference_and_values(prompts, tokens)
        failures = Failures()
        groups: list[Group] = []
        for i, problem in enumerate(problems):
            scored = scores[i].finish()
            failures.add(scored.failures)
            rewards = torch.tensor([total(b, self.weights) for b in scored.breakdowns])
            steps = None
            if scored.steps is not None:
                of_each = zip(sampled[i], scored.steps, rewards.tolist(), strict=True)
                steps = [self._token_steps(completion, found, reward) for completion, found, reward in of_each]
            group = Group(
                problem=problem,
                prompt=prompts[i],
                completions=sampled[i],
                responses=scores[i].responses,
                breakdowns=scored.breakdowns,
                rewards=rewards,
                steps=steps,
                ref_logprobs=ref_logprobs[i],
                values=values[i],
            )
            groups.append(group)
        return groups, failures

    def _observe(self, group: Group) -> None:
        """Groups that dynamic sampling is to replace count too: they are what a curriculum passes over."""
        if "accuracy" in group.breakdowns[0]:
            pass_rate = sum(b["accuracy"] for b in group.breakdowns) / len(group.breakdowns)
            self.orders[group.problem.domain].observe(group.problem, pass_rate)

    def _token_steps(self, completion: Completion, steps: list[tuple[int, float]], outcome: float) -> list[Step]:
        """Steps by the token that ends them, not by the character; the completion's end is the last step and carries
        the outcome, scaled to the 0..1 of the others."""
        scale = sum(abs(w) for w in self.weights.values()) or 1.0
        by_token = [(self._token_at(completion.tokens, end), reward) for end, reward in steps]
        return [*by_token, (len(completion.tokens) - 1, outcome / scale)]

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

    def _reference_and_values(
        self, prompts: list[list[int]], tokens: list[list[list[int]]]
    ) -> tuple[list[list[Tensor] | None], list[list[Tensor] | None]]:
        """What the reference and the learnt value say of each group's completions, where the method asks them."""
        repeated = [prompt for prompt, group in zip(prompts, tokens, strict=True) for _ in group]
        flat = [completion for group in tokens for completion in group]
        ref_logprobs = values = None
        if self.method.needs_reference(self.settings):
            with self.models.reference() as reference:
                ref_logprobs = self._measure(
                    lambda p, c: completion_logprobs(reference, p, c, self.temperature), repeated, flat
                )
        if self.models.value is not None:
            with self.models.value.whole() as value:
                values = self._measure(lambda p, c: values_of(value, p, c), repeated, flat)
        size = self.settings.group_size
        return _grouped(ref_logprobs, len(prompts), size), _grouped(values, len(prompts), size)

    def _with_credit(self, groups: list[Group]) -> Rollout:
        prompts = [g.prompt for g in groups for _ in g.completions]
        sampled = [c for g in groups for c in g.completions]
        tokens = [c.tokens for c in sampled]
        ref_logprobs = _flat([g.ref_logprobs for g in groups])
        values = _flat([g.values for g in groups])
        breakdowns = [b for g in groups for b in g.breakdowns]
        rewards = torch.stack([g.rewards for g in groups])
        best = (rewards > rewards.mean(1, keepdim=True)).flatten().tolist()
        evidence = Evidence(
            rewards=rewards,
            # Where no rule decides, RFT keeps what is better than its group.
            right=[b.get("accuracy", float(better)) == 1.0 for b, better in zip(breakdowns, best, strict=True)],
            lengths=[len(t) for t in tokens],
            steps=_flat([g.steps for g in groups]),
            logprobs=[torch.tensor(c.logprobs) for c in sampled],
            ref_logprobs=ref_logprobs,
            values=values,
        )
        credit = self.credit(evidence, self.settings)
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
        units = [[i] for i in range(len(tokens))]
        # Without gradients nothing is kept for a backward pass: more fits, and larger products are faster.
        for batch in micro_batches(prompts, tokens, units, 4 * self.settings.micro_batch_tokens):
            table = of([prompts[i] for i in batch], [tokens[i] for i in batch]).float().cpu()
            results |= {i: row[: len(tokens[i])].clone() for i, row in zip(batch, table, strict=True)}
        return [results[i] for i in range(len(tokens))]


def _grouped(values: list[Tensor] | None, groups: int, size: int) -> list[list[Tensor] | None]:
    return [None if values is None else values[i * size : (i + 1) * size] for i in range(groups)]


def _flat(of_groups: list[list[T] | None]) -> list[T] | None:
    """One list of all groups' values; None if they have none."""
    known = [values for values in of_groups if values is not None]
    return [value for values in known for value in values] if known else None
