"""Collecting rollouts: sample groups of completions, score them as they arrive, assign credit (DSM algorithm 1).

Differences from the paper: if the sampler is exactly the policy, its own log-probabilities are used as those of the old
policy. If it is not (vLLM, or weights that are one rollout old), the trainer computes them, and each token's advantage
is multiplied by the truncated ratio of the two (truncated importance sampling).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo.config.jobs import RLJob
from grpo.data.template import opened_reasoning
from grpo.distributed.process_group import Parallel
from grpo.generation.engines import make_engine
from grpo.model.logprobs import completion_logprobs
from grpo.model.value_head import values_of
from grpo.rewards.registry import total
from grpo.rl.batch import CompletionGroup, Rollout, TokenStep
from grpo.rl.credit import CREDITS, CreditInputs, teach_nothing
from grpo.rl.method_table import Method
from grpo.rl.metrics import kept_metrics, kl_of, metrics_of, samples_of
from grpo.rl.model_set import Models
from grpo.rl.per_token_values import PerToken, measure
from grpo.rl.prefetch import Prefetcher, RolloutRequest
from grpo.rl.problem_order import ProblemOrder, problems_of_rollout
from grpo.rl.step_tokens import step_tokens
from grpo.scoring.reward_weights import reward_weights
from grpo.scoring.scorer import Failures, Scorer

T = TypeVar("T")


class RolloutCollector:
    """Collects the rollouts of one job."""

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
        self.tokenizer, self.scorer, self.orders = tokenizer, scorer, orders
        engine = make_engine(job.model, self.settings, models, tokenizer.eos_token_id)
        self.prefetcher = Prefetcher(job, engine, models, tokenizer, scorer, parallel)
        self.prefetched: RolloutRequest | None = None
        self.weights = reward_weights(self.settings)
        self.credit = CREDITS[method.credit]
        self.temperature = method.temperature(self.settings)
        self.outcome_only: list[list[TokenStep] | None] = [None] * self.settings.group_size

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        """Returns the rollout for the updates that start at `step`. A different `attempt` samples different
        completions."""
        request = self.prefetched or self._request(step, minibatches, attempt)
        assert request.step == step, (request.step, step)
        self.prefetched = None
        groups, failures = self._groups_of(request)
        every = [*groups]
        for number in range(1, self.settings.dynamic_sampling_rounds + 1):
            flat = [i for i, group in enumerate(groups) if teach_nothing(group)]
            if not flat:
                break
            problems = [self.orders[groups[i].problem.domain].take(1)[0] for i in flat]
            replacements, more = self._groups_of(self.prefetcher.sample(problems, step, (step, attempt, number)))
            for i, group in zip(flat, replacements, strict=True):
                groups[i] = group
            every += replacements
            failures.add(more)
        rollout = self._with_credit(groups, self._inexact(request))
        rollout.max_new_tokens = request.sampling.max_new_tokens
        rollout.metrics = metrics_of(every, failures, self.weights)
        if self.settings.dynamic_sampling_rounds:
            rollout.metrics |= kept_metrics(groups, self.weights)
        rollout.metrics["replaced_groups"] = float(len(every) - len(groups))
        if (engine := self.prefetcher.engine.name) != "own":
            rollout.metrics[f"sampler_{engine}"] = 1.0
        if self.method.online:
            rollout.metrics |= kl_of(every)
        if self.settings.rollouts_ahead:
            rollout.metrics["sampler_age"] = float(self.models.version - request.version)  # updates
        rollout.samples = samples_of(groups[:2], rollout.advantages, step)
        return rollout

    def begin(self, step: int, minibatches: int, attempt: int) -> None:
        """Starts sampling the next rollout in the background."""
        self.prefetched = self._request(step, minibatches, attempt, background=True)

    def _request(self, step: int, minibatches: int, attempt: int, *, background: bool = False) -> RolloutRequest:
        problems = problems_of_rollout(self.orders, self.settings, step, minibatches)
        return self.prefetcher.sample(problems, step, (step, attempt, 0), background=background)

    def wait(self) -> None:
        """Blocks until the rollout started in the background is sampled, on all processes: a server that one of them
        sends weights to would hold back what others have asked for, and they would not come to receive the weights."""
        if self.prefetched is not None:
            self.prefetched.results.result()
            self.parallel.barrier()

    def state(self) -> dict[str, Any]:
        """Returns plain data for a checkpoint. Waits for a rollout in progress. All processes must call it together."""
        prefetched = self.prefetched and self.prefetcher.state(self.prefetched, self.models.version)
        return {"orders": {name: order.state() for name, order in self.orders.items()}, "begun": prefetched}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Without "begun" in it, the next rollout is sampled anew."""
        self.wait()  # a thread may sample with a copy of the weights that the next rollout overwrites
        for name, of_order in state["orders"].items():
            self.orders[name].restore(of_order)
        self.prefetched = None
        if prefetched := state.get("begun"):
            problems = {p.id: p for order in self.orders.values() for of in order.sources.values() for p in of}
            self.prefetched = self.prefetcher.restore(prefetched, self.models.version, problems)

    def close(self) -> None:
        self.prefetcher.close()

    def _groups_of(self, request: RolloutRequest) -> tuple[list[CompletionGroup], Failures]:
        """Returns all groups, in problem order, on every process; each process computes and scores its own share."""
        failures, of_problem = Failures(), dict[int, CompletionGroup]()
        for share, (groups, failed) in zip(
            request.shares, self.parallel.all_gather(self._finish_share(request)), strict=True
        ):
            of_problem |= zip(share, groups, strict=True)
            failures.add(failed)
        failures.stop_above(self.settings.scoring.max_failure_share)
        groups_in_order = [of_problem[i] for i in range(len(request.problems))]
        for group in groups_in_order:
            self._observe(group)
        return groups_in_order, failures

    def _finish_share(self, request: RolloutRequest) -> tuple[list[CompletionGroup], Failures]:
        results = request.results.result()
        prompts = [request.prompts[number] for number in request.mine]
        completions = [results[number][0] for number in request.mine]
        measured = self._measured(prompts, [[c.tokens for c in group] for group in completions], self._inexact(request))
        failures = Failures()
        groups: list[CompletionGroup] = []
        pending = [results[number][1] for number in request.mine]
        finished = self.scorer.finish(pending)
        for position, (number, scores, scored) in enumerate(zip(request.mine, pending, finished, strict=True)):
            failures.add(scored.failures)
            rewards = torch.tensor([total(b, self.weights) for b in scored.breakdowns])
            steps = None
            if scored.steps is not None:
                of_each = zip(completions[position], scored.steps, scored.breakdowns, strict=True)
                # If the prompt ends with the opening reasoning tag, step positions are counted from that tag.
                opened = len(opened_reasoning(self.tokenizer, prompts[position]))
                steps = [
                    self._token_steps(completion.tokens, [(end - opened, of_step) for end, of_step in spans], b)
                    for completion, spans, b in of_each
                ]
            group = CompletionGroup(
                problem=request.problems[number],
                prompt=prompts[position],
                completions=completions[position],
                responses=scores.responses,
                breakdowns=scored.breakdowns,
                given=scored.given,
                rewards=rewards,
                steps=steps,
                **{name: of_groups[position] for name, of_groups in measured.items()},
            )
            groups.append(group)
        return groups, failures

    def _inexact(self, request: RolloutRequest) -> bool:
        """Whether the sampler's log-probabilities differ from those of the policy that is about to be updated."""
        samples_policy = self.method.online
        return samples_policy and not (self.prefetcher.engine.exact and request.version == self.models.version)

    def _observe(self, group: CompletionGroup) -> None:
        """Reports a problem's pass rate to the curriculum, also for groups that dynamic sampling discards."""
        if "accuracy" in group.breakdowns[0]:
            pass_rate = sum(b["accuracy"] for b in group.breakdowns) / len(group.breakdowns)
            self.orders[group.problem.domain].observe(group.problem, pass_rate)

    def _token_steps(
        self, tokens: list[int], steps: list[tuple[int, float]], breakdown: dict[str, float]
    ) -> list[TokenStep]:
        """Converts step ends from characters to tokens. The end of the completion is the last step; its reward is the
        outcome, scaled to [0, 1] like the others."""
        ends = step_tokens(self.tokenizer, tokens, [end for end, _ in steps])
        by_token = [(end, reward) for end, (_, reward) in zip(ends, steps, strict=True)]
        scale = sum(abs(self.weights[name]) for name in breakdown) or 1.0
        return [*by_token, (len(tokens) - 1, total(breakdown, self.weights) / scale)]

    def _measured(
        self, prompts: list[list[int]], tokens: list[list[list[int]]], inexact: bool
    ) -> dict[str, list[list[Tensor] | None]]:
        """Returns the fields of CompletionGroup that models compute: log-probabilities and values, if the method uses
        them."""
        repeated = [prompt for prompt, group in zip(prompts, tokens, strict=True) for _ in group]
        flat = [completion for group in tokens for completion in group]
        measured: dict[str, list[Tensor] | None] = dict.fromkeys(("ref_logprobs", "old_logprobs", "values"))

        def measured_by(of: PerToken) -> list[Tensor]:
            return measure(of, repeated, flat, self.settings.micro_batch_tokens, self.parallel)

        if self.method.reads_reference(self.settings):
            with self.models.reference_logprobs(self.temperature) as of_reference:
                measured["ref_logprobs"] = measured_by(of_reference)
        # A single update starts from the current policy and computes the old log-probabilities itself.
        if inexact and self.settings.minibatches * self.settings.inner_epochs > 1:
            policy = self.models.policy
            measured["old_logprobs"] = measured_by(lambda p, c: policy(completion_logprobs, p, c, self.temperature))
        if (value := self.models.value) is not None:
            measured["values"] = measured_by(lambda p, c: value(values_of, p, c))
        return {name: _grouped(values, len(prompts), self.settings.group_size) for name, values in measured.items()}

    def _with_credit(self, groups: list[CompletionGroup], inexact: bool) -> Rollout:
        prompts = [g.prompt for g in groups for _ in g.completions]
        sampled = [c for g in groups for c in g.completions]
        tokens = [c.tokens for c in sampled]
        logprobs = [torch.tensor(c.logprobs) for c in sampled]
        ref_logprobs = _flat([g.ref_logprobs for g in groups])
        values = _flat([g.values for g in groups])
        breakdowns = [b for g in groups for b in g.breakdowns]
        rewards = torch.stack([g.rewards for g in groups])
        best = (rewards > rewards.mean(1, keepdim=True)).flatten().tolist()
        inputs = CreditInputs(
            rewards=rewards,
            # If no rule checks correctness, RFT keeps completions with a reward above the group's mean.
            correct=[b.get("accuracy", float(better)) == 1.0 for b, better in zip(breakdowns, best, strict=True)],
            lengths=[len(t) for t in tokens],
            steps=[steps for g in groups for steps in g.steps or self.outcome_only],
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            values=values,
        )
        credit = self.credit(inputs, self.settings)
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
            experts=[c.experts for c in sampled] if self.settings.experts.replay else None,
        )


def _grouped(values: list[Tensor] | None, groups: int, size: int) -> list[list[Tensor] | None]:
    return [None if values is None else values[i * size : (i + 1) * size] for i in range(groups)]


def _flat(of_groups: list[list[T] | None]) -> list[T] | None:
    """Concatenates the values of all groups; None if there are none."""
    known = [values for values in of_groups if values is not None]
    return [value for values in known for value in values] if known else None
