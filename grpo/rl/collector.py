"""Making experience: ask problems, sample groups, score them while sampling goes on, give credit (DSM algorithm 1).

Departures from the paper: old log-probabilities are the sampler's own where it is exactly the policy. Where it is not
(vLLM, or weights that are one rollout old), the trainer's take their place, and each token's advantage is weighted by
the ratio of the two, truncated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo.algorithms.advantages import zero_variance_groups
from grpo.config.jobs import RLJob
from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.distributed.process_group import Parallel
from grpo.generation.engines import make_engine
from grpo.model.packed.logprobs import completion_logprobs
from grpo.model.packed.packing import micro_batches
from grpo.model.packed.value_head import values_of
from grpo.rewards.registry import total
from grpo.rl.batch import Rollout
from grpo.rl.credit import CREDITS, Evidence, Step
from grpo.rl.groups import Group, kl_of, metrics_of, samples_of
from grpo.rl.methods import Method
from grpo.rl.model_set import Models
from grpo.rl.prefetch import Asked, Generation
from grpo.rl.problem_order import ProblemOrder
from grpo.scoring.scorer import Failures, Scorer
from grpo.scoring.weights import reward_weights

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
        self.settings, self.method, self.models, self.parallel = job.settings, method, models, parallel
        self.tokenizer, self.orders = tokenizer, orders
        engine = make_engine(job.model, self.settings, models, tokenizer.eos_token_id)
        self.generation = Generation(job, engine, models, tokenizer, scorer, parallel)
        self.begun: Asked | None = None
        self.weights = reward_weights(self.settings)
        self.credit = CREDITS[method.credit]
        self.temperature = method.temperature(self.settings)

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        """A rollout for updates that begin at `step`; another `attempt` draws other completions."""
        asked = self.begun or self._ask(step, minibatches, attempt)
        assert asked.step == step, (asked.step, step)
        self.begun = None
        groups, failures = self._groups_of(asked)
        replaced = 0
        for number in range(1, self.settings.dynamic_sampling_rounds + 1):
            flat = zero_variance_groups(torch.stack([g.rewards for g in groups])).nonzero().flatten().tolist()
            if not flat:
                break
            problems = [self.orders[groups[i].problem.domain].take(1)[0] for i in flat]
            fresh, more = self._groups_of(self.generation.ask(problems, step, (step, attempt, number)))
            for i, group in zip(flat, fresh, strict=True):
                groups[i] = group
            failures.add(more)
            replaced += len(flat)
        rollout = self._with_credit(groups, self._inexact(asked))
        rollout.metrics = metrics_of(groups, failures, self.weights) | {"replaced_groups": float(replaced)}
        if self.method.online:
            rollout.metrics |= kl_of(groups)
        if self.settings.rollouts_ahead:
            rollout.metrics["sampler_age"] = float(self.models.version - asked.version)  # updates
        rollout.samples = samples_of(groups[:2], rollout.advantages, step)
        return rollout

    def begin(self, step: int, minibatches: int, attempt: int) -> None:
        """Start on the rollout that will be collected next, and return at once."""
        self.begun = self._ask(step, minibatches, attempt, beside=True)

    def _ask(self, step: int, minibatches: int, attempt: int, *, beside: bool = False) -> Asked:
        problems = self._problems_for(step, minibatches)
        return self.generation.ask(problems, step, (step, attempt, 0), beside=beside)

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint; waits for what has begun. All processes call it together."""
        begun = self.begun and self.generation.state(self.begun, self.models.version)
        return {"orders": {name: order.state() for name, order in self.orders.items()}, "begun": begun}

    def restore(self, state: dict[str, Any]) -> None:
        for name, of_order in state["orders"].items():
            self.orders[name].restore(of_order)
        self.begun = None
        if begun := state["begun"]:
            known = {p.id: p for order in self.orders.values() for of in order.sources.values() for p in of}
            self.begun = self.generation.restore(begun, self.models.version, known)

    def close(self) -> None:
        self.generation.close()

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

    def _groups_of(self, asked: Asked) -> tuple[list[Group], Failures]:
        """Each process measures and scores its share of what was asked; all get all groups, in the problems' order."""
        done = self._finish_share(asked)
        failures, of_problem = Failures(), dict[int, Group]()
        for share, (groups, failed) in zip(asked.shares, self.parallel.gather(done), strict=True):
            of_problem |= zip(share, groups, strict=True)
            failures.add(failed)
        failures.stop_above(self.settings.scoring.max_failure_share)
        found = [of_problem[i] for i in range(len(asked.problems))]
        for group in found:
            self._observe(group)
        return found, failures

    def _finish_share(self, asked: Asked) -> tuple[list[Group], Failures]:
        answers = asked.answers.result()
        prompts = [asked.prompts[number] for number in asked.mine]
        completions = [answers[number][0] for number in asked.mine]
        measured = self._measured(prompts, [[c.tokens for c in group] for group in completions], self._inexact(asked))
        failures = Failures()
        groups: list[Group] = []
        for place, number in enumerate(asked.mine):
            scores = answers[number][1]
            scored = scores.finish()
            failures.add(scored.failures)
            rewards = torch.tensor([total(b, self.weights) for b in scored.breakdowns])
            steps = None
            if scored.steps is not None:
                of_each = zip(completions[place], scored.steps, rewards.tolist(), strict=True)
                steps = [self._token_steps(completion, found, reward) for completion, found, reward in of_each]
            group = Group(
                problem=asked.problems[number],
                prompt=prompts[place],
                completions=completions[place],
                responses=scores.responses,
                breakdowns=scored.breakdowns,
                rewards=rewards,
                steps=steps,
                **{name: of_groups[place] for name, of_groups in measured.items()},
            )
            groups.append(group)
        return groups, failures

    def _inexact(self, asked: Asked) -> bool:
        """Whether the sampler's log-probabilities are not those of the policy that is about to learn."""
        samples_policy = self.method.online
        return samples_policy and not (self.generation.engine.exact and asked.version == self.models.version)

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

    def _measured(
        self, prompts: list[list[int]], tokens: list[list[list[int]]], inexact: bool
    ) -> dict[str, list[list[Tensor] | None]]:
        """What the models say of each group's completions, where the method asks them: fields of Group."""
        repeated = [prompt for prompt, group in zip(prompts, tokens, strict=True) for _ in group]
        flat = [completion for group in tokens for completion in group]
        measured: dict[str, list[Tensor] | None] = dict.fromkeys(("ref_logprobs", "old_logprobs", "values"))

        def logprobs_of(model: Any) -> list[Tensor]:
            return self._measure(lambda p, c: completion_logprobs(model, p, c, self.temperature), repeated, flat)

        if self.method.reads_reference(self.settings):
            with self.models.reference() as reference:
                measured["ref_logprobs"] = logprobs_of(reference)
        # One update learns from the policy as it is: it finds these on its way.
        if inexact and self.settings.minibatches * self.settings.inner_epochs > 1:
            with self.models.policy.whole() as policy:
                measured["old_logprobs"] = logprobs_of(policy)
        if self.models.value is not None:
            with self.models.value.whole() as value:
                measured["values"] = self._measure(lambda p, c: values_of(value, p, c), repeated, flat)
        return {name: _grouped(values, len(prompts), self.settings.group_size) for name, values in measured.items()}

    def _with_credit(self, groups: list[Group], inexact: bool) -> Rollout:
        prompts = [g.prompt for g in groups for _ in g.completions]
        sampled = [c for g in groups for c in g.completions]
        tokens = [c.tokens for c in sampled]
        logprobs = [torch.tensor(c.logprobs) for c in sampled]
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
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
        )
        credit = self.credit(evidence, self.settings)
        return Rollout(
            prompts=prompts,
            completions=tokens,
            advantages=credit.advantages,
            old_logprobs=_flat([g.old_logprobs for g in groups]) if inexact else logprobs,
            sampler_logprobs=logprobs if inexact else None,
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
