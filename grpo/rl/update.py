"""One optimizer step on a minibatch of a rollout: micro-batches forward and backward, then the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from grpo.algorithms.dpo import dpo_loss
from grpo.algorithms.gae import value_loss
from grpo.algorithms.importance_sampling import correct_for_sampler
from grpo.algorithms.objectives import Objective
from grpo.algorithms.tokens import Normalizers, Tokens, pad
from grpo.config.rl import RL
from grpo.distributed.fsdp import clip_grad_norm
from grpo.distributed.process_group import Parallel, divide
from grpo.distributed.sequence_group import sharing_tokens
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.ordered_gradients import ordered_gradients
from grpo.model.packed.packing import micro_batches
from grpo.model.packed.transfer import to_device
from grpo.model.routers import balance_loss, experts_in_pack, recorded, replayed
from grpo.model.value_head import values_of
from grpo.rl.batch import Rollout
from grpo.rl.method_table import Method
from grpo.rl.model_set import Models
from grpo.training.optimizer import learning_rate_share, make_optimizer, step_if_finite
from grpo.training.totals import Totals

Stats = dict[str, Tensor]
Loss = Callable[[Rollout, list[int], Normalizers], tuple[Tensor, Stats]]


class Update:
    """Applies the method's loss and the optimizer."""

    def __init__(self, settings: RL, method: Method, models: Models, parallel: Parallel):
        self.settings, self.models, self.parallel = settings, models, parallel
        self.device = parallel.device
        self.temperature = method.temperature(settings)
        self.objective = Objective(
            method.objective_name(settings),
            clip_eps_low=settings.clip_eps_low,
            clip_eps_high=settings.clip_eps_high,
            kl_coef=method.loss_kl_coef(settings),
            kl_estimator=settings.kl_estimator,
            kl_stale_correction=settings.kl_stale_correction,
        )
        losses: dict[str, Loss] = {
            "policy": self._policy_loss,
            "actor_critic": self._actor_critic_loss,
            "preference": self._preference_loss,
        }
        self.loss, self.of_pairs = losses[method.loss], method.loss == "preference"
        self.skips_zero_advantages = method.skips_zero_advantages(settings)
        self.groups = models.parameter_groups()
        self.peaks = [group["lr"] for group in self.groups]
        self.optimizer = make_optimizer(self.groups, settings.optimizer)

    def __call__(self, rollout: Rollout, units: Sequence[int], step: int, rate: float = 1.0) -> dict[str, float]:
        """Runs optimizer step `step`, counted from 0, on these units of the rollout. `rate` scales the learning rate.

        Returns metrics: means over the step's tokens, extremes (_min, _max) and gradient norms.
        """
        rate *= learning_rate_share(step, self.settings.steps, self.settings.optimizer)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        needed = all if self.of_pairs else any  # a pair of which one side is masked has no contrast
        parts = [
            rollout.units[unit] for unit in units if needed(self._counts(rollout, row) for row in rollout.units[unit])
        ]
        rows = [row for unit in units for row in rollout.units[unit]]
        computed = [row for part in parts for row in part]
        normalizers = Normalizers(
            sequences=len(computed if self.of_pairs else rows),
            tokens=max(1, self._learnt_tokens(rollout, rows)),
            budget=rollout.max_new_tokens or self.settings.max_new_tokens(step),
            measured=self._learnt_tokens(rollout, computed),
        )
        self._train(True)
        totals = Totals()
        for batch, counts in self._share(rollout, parts):
            part = [row for number in batch for row in parts[number]]
            with self._replaying(rollout, part), sharing_tokens(self.parallel.sequence):
                loss, measured = self._balanced_loss(rollout, part, normalizers, len(part) / sum(map(len, parts)))
                with ordered_gradients(self.device):
                    (loss if counts else loss * 0).backward()
            if counts and self.parallel.reports:
                totals.add({"loss": loss, **measured})
        stats = self.parallel.reduce(totals.read())
        for name, group in zip(("grad_norm", "value_grad_norm"), self.groups, strict=False):
            stats[name] = clip_grad_norm(group["params"], self.settings.optimizer.max_grad_norm)
        stats["learning_rate"] = self.peaks[0] * rate
        if step_if_finite(self.optimizer, stats.values()):
            self.models.version += 1
        self._train(False)
        return stats

    def _train(self, mode: bool) -> None:
        """Modules recompute activations, if the settings say so, only in training mode."""
        self.models.policy.train(mode)
        if self.models.value is not None:
            self.models.value.train(mode)

    def _replaying(self, rollout: Rollout, rows: list[int]) -> AbstractContextManager[None]:
        """Context in which the policy routes these sequences to the experts that the sampler chose, if the job replays
        them."""
        if rollout.experts is None:
            return nullcontext()
        prompts, completions = [rollout.prompts[i] for i in rows], [rollout.completions[i] for i in rows]
        chosen = experts_in_pack(prompts, completions, [rollout.experts[i] for i in rows], self.device)
        return replayed(self.models.routers, chosen)

    def _balanced_loss(
        self, rollout: Rollout, rows: list[int], normalizers: Normalizers, share: float
    ) -> tuple[Tensor, Stats]:
        """The method's loss plus the load-balancing loss of the experts, for this `share` of the step."""
        if not (coef := self.settings.experts.balance_coef):
            return self.loss(rollout, rows, normalizers)
        with recorded(self.models.routers) as routings:
            loss, stats = self.loss(rollout, rows, normalizers)
        balance = balance_loss(routings) * share
        return loss + coef * balance, {**stats, "expert_balance": balance.detach()}

    def _share(self, rollout: Rollout, parts: list[list[int]]) -> list[tuple[list[int], bool]]:
        """This process's micro-batches (indices into `parts`), and whether each counts. All processes run the same
        number, so a process with fewer repeats a short one with zero weight. Processes that share tokens have the same
        ones."""
        batches = micro_batches(rollout.prompts, rollout.completions, parts, self.settings.micro_batch_tokens)
        lengths = [sum(len(rollout.prompts[row]) + len(rollout.completions[row]) for row in part) for part in parts]
        shares = divide([sum(lengths[number] for number in batch) for batch in batches], self.parallel.data_world)
        mine = [(batches[i], True) for i in shares[self.parallel.data_rank]]
        if missing := max(map(len, shares)) - len(mine):
            shortest = min(range(len(parts)), key=lengths.__getitem__)
            mine += [([shortest], False)] * missing
        return mine

    def _learnt_tokens(self, rollout: Rollout, rows: list[int]) -> int:
        return sum(len(rollout.completions[row]) for row in rows if rollout.learnt[row])

    def _counts(self, rollout: Rollout, row: int) -> bool:
        return rollout.learnt[row] and not (self.skips_zero_advantages and not rollout.advantages[row].any())

    def _tokens(self, rollout: Rollout, rows: list[int]) -> Tokens:
        prompts, completions = [rollout.prompts[i] for i in rows], [rollout.completions[i] for i in rows]
        logprobs = self.models.policy(completion_logprobs, prompts, completions, self.temperature)
        old, reference = rollout.old_logprobs, rollout.ref_logprobs
        return Tokens(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else self._padded(old, rows),
            ref_logprobs=None if reference is None else self._padded(reference, rows),
            advantages=self._padded(rollout.advantages, rows),
            mask=self._to_device(rollout.mask(rows)),
        )

    def _policy_loss(self, rollout: Rollout, rows: list[int], normalizers: Normalizers) -> tuple[Tensor, Stats]:
        tokens = self._tokens(rollout, rows)
        of_sampler: Stats = {}
        if rollout.sampler_logprobs is not None:
            sampler = self._padded(rollout.sampler_logprobs, rows)
            tokens, of_sampler = correct_for_sampler(tokens, sampler, self.settings.sampler_ratio_max, normalizers)
        loss, stats = self.objective(tokens, normalizers)
        change = (tokens.logprobs.detach() - tokens.old_logprobs).abs() * tokens.mask
        return loss, {**stats, **of_sampler, "logprob_change_max": change.max()}

    def _actor_critic_loss(self, rollout: Rollout, rows: list[int], normalizers: Normalizers) -> tuple[Tensor, Stats]:
        assert self.models.value is not None and rollout.old_values is not None and rollout.returns is not None
        loss, stats = self._policy_loss(rollout, rows, normalizers)
        of_value = value_loss(
            self.models.value(values_of, [rollout.prompts[i] for i in rows], [rollout.completions[i] for i in rows]),
            self._padded(rollout.old_values, rows),
            self._padded(rollout.returns, rows),
            self._to_device(rollout.mask(rows)),
            self.settings.ppo.value_clip,
            normalizers,
        )
        return loss + self.settings.ppo.value_coef * of_value, {**stats, "value_loss": of_value.detach()}

    def _preference_loss(self, rollout: Rollout, rows: list[int], normalizers: Normalizers) -> tuple[Tensor, Stats]:
        """The DPO loss; rows alternate between chosen and rejected."""
        tokens = self._tokens(rollout, rows)
        assert tokens.ref_logprobs is not None
        loss, stats = dpo_loss(
            tokens.logprobs[::2],
            tokens.logprobs[1::2],
            tokens.ref_logprobs[::2],
            tokens.ref_logprobs[1::2],
            tokens.mask[::2],
            tokens.mask[1::2],
            beta=self.settings.dpo.beta,
            length_average=self.settings.dpo.length_average,
            pairs=normalizers.sequences // 2,
        )
        return loss, {f"pair_{name}": value for name, value in stats.items()}

    def _padded(self, vectors: list[Tensor], rows: list[int]) -> Tensor:
        return self._to_device([vectors[i] for i in rows])

    def _to_device(self, vectors: list[Tensor]) -> Tensor:
        return to_device(pad(vectors, torch.device("cpu")), self.device)
