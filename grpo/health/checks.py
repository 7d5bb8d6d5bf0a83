"""Checks of each step's metrics for known failures of RL training.

A record is one line of metrics.jsonl, so this module does not need torch. Limits marked "Ours" were chosen so that
recorded runs of the tiny recipe (50 to 120 steps each, with changing reward and entropy) report nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from pydantic import Field

from grpo.health.base import (
    Action,
    AgainstRecent,
    Check,
    CheckResult,
    CheckSettings,
    CheckState,
    HealthEvent,
    Record,
    finite,
)
from grpo.health.guards import KLBudget, RuleAccuracy, kl_budget, rule_accuracy
from grpo.settings import Settings


class NotFinite(CheckSettings):
    """A loss, gradient norm, reward or KL that is NaN or infinite."""

    action: Action = Field(
        "roll_back",
        description="NaN stays in the weights and Adam's moments, so continuing is useless; other samples mostly "
        "succeed. Ours.",
    )


class VarianceCollapse(CheckSettings):
    """Most groups have equal rewards, so their advantages are zero."""

    steps: int = Field(10, ge=1, description="Consecutive steps. R1-Zero can begin with a few, nearly all wrong. Ours.")
    limit: float = Field(0.9, gt=0, le=1, description="Share of groups with equal rewards that counts as bad. Ours.")
    baseline_steps: int = Field(10, ge=1, description="First steps; their median reward is the baseline. Ours.")


class KLBlowUp(CheckSettings):
    """KL to the reference is too large."""

    steps: int = Field(5, ge=1, description="Consecutive steps: k3 has heavy tails, so one step may show 8. Ours.")
    limit: float = Field(1.0, gt=0, description="Largest KL, nats per token. Healthy runs here: below 0.2. Ours.")


class MismatchGrowth(CheckSettings):
    """Log-probabilities of sampler and trainer drift apart."""

    action: Action = Field(
        "stop", description="Every further step uses wrong importance ratios, and rolling back does not help."
    )
    steps: int = Field(3, ge=1, description="Consecutive rollouts: the metric is a maximum over tokens. Ours.")
    factor: float = Field(5.0, gt=1, description="Largest multiple of the baseline. TRL issue 5312 (a mean): 13. Ours.")
    floor: float = Field(
        0.1, ge=0, description="Limit is at least this, nats. Rounding: 1e-5 in float32, more in bfloat16. Ours."
    )
    baseline_steps: int = Field(5, ge=1, description="First rollouts; their smallest value is the baseline. Ours.")


class LengthExplosion(AgainstRecent):
    """Completions become much longer and are cut off."""

    steps: int = Field(5, ge=1, description="Consecutive steps. Ours.")
    factor: float = Field(
        2.0, gt=1, description="Mean length, times the usual, that is bad if truncation rises too. Ours."
    )
    truncated_rise: float = Field(0.1, ge=0, le=1, description="Rise of the truncated share over the usual one. Ours.")
    truncated_limit: float = Field(0.5, gt=0, le=1, description="Truncated share that is bad at any length. Ours.")


class EntropyCollapse(CheckSettings):
    """Entropy of the policy falls close to zero."""

    steps: int = Field(10, ge=1, description="Consecutive steps. Ours.")
    share: float = Field(0.05, ge=0, lt=1, description="Smallest share of the baseline. Healthy runs here: 0.16. Ours.")
    floor: float = Field(0.002, ge=0, description="Limit is at least this, nats per token. Ours.")
    baseline_steps: int = Field(10, ge=1, description="First steps; their median is the baseline. Ours.")


class RewardCollapse(CheckSettings):
    """Mean reward falls far below its best."""

    share: float = Field(0.3, gt=0, description="Largest fall of the moving mean, as a share of its best. Ours.")
    floor: float = Field(0.1, ge=0, description="Falls smaller than this are noise, units of reward. Ours.")
    window: int = Field(10, ge=1, description="Steps of the moving mean. Ours.")


class GradientSpike(AgainstRecent):
    """Gradient norm, before clipping, is far above the usual."""

    factor: float = Field(
        10.0, gt=1, description="Largest multiple of the usual norm before clipping. Healthy here: 2.5. Ours."
    )
    floor: float = Field(1.0, ge=0, description="Limit is at least this: a smaller norm is hardly clipped. Ours.")


class HealthSettings(Settings):
    """Settings of every check, by its name in `CHECKS`."""

    not_finite: NotFinite = NotFinite()
    variance_collapse: VarianceCollapse = VarianceCollapse()
    kl_blow_up: KLBlowUp = KLBlowUp()
    mismatch_growth: MismatchGrowth = MismatchGrowth()
    length_explosion: LengthExplosion = LengthExplosion()
    entropy_collapse: EntropyCollapse = EntropyCollapse()
    reward_collapse: RewardCollapse = RewardCollapse()
    gradient_spike: GradientSpike = GradientSpike()
    kl_budget: KLBudget = KLBudget()
    rule_accuracy: RuleAccuracy = RuleAccuracy()
    max_roll_backs: int = Field(2, ge=0, description="Rollbacks after which the next one stops training instead. Ours.")
    recovery_steps: int = Field(5, ge=1, description="Consecutive good values after which a failure has ended. Ours.")


def not_finite(limits: NotFinite, state: CheckState, record: Record) -> CheckResult | None:
    """Loss, gradient norm, reward or KL is NaN or infinite."""
    watched = [name for name in ("loss", "grad_norm", "reward", "kl") if name in record]
    broken = [f"{name} is {record[name]}" for name in watched if not math.isfinite(record[name])]
    advice = "lower the learning rate, or compute in float32 rather than bfloat16"
    return CheckResult(bool(broken), f"{', '.join(broken)} (must be finite)", advice) if watched else None


def variance_collapse(limits: VarianceCollapse, state: CheckState, record: Record) -> CheckResult | None:
    """Nearly all groups have equal rewards."""
    share, reward = finite(record, "zero_variance_share"), finite(record, "reward")
    if share is None:
        return None
    evidence = f"{share:.0%} of groups have equal rewards (limit {limits.limit:.0%}), so that they teach nothing"
    advice = "ask harder problems if they are solved, easier ones if not"
    if reward is not None:
        early = median(state.first("reward", reward, limits.baseline_steps))
        if math.isclose(reward, early, rel_tol=0.1, abs_tol=0.05):
            evidence += f"; mean reward {reward:.3g} is what it was at the start: the problems are too easy or too hard"
        elif reward > early:
            evidence += f"; mean reward rose from {early:.3g} to {reward:.3g}: nearly all right"
            advice = "ask harder problems, or end here"
        else:
            evidence += f"; mean reward fell from {early:.3g} to {reward:.3g}: nearly all wrong"
            advice = "go back to an earlier checkpoint, lower the learning rate, and look at the samples"
    return CheckResult(share >= limits.limit, evidence, advice)


def kl_blow_up(limits: KLBlowUp, state: CheckState, record: Record) -> CheckResult | None:
    """The KL to the reference is above its limit."""
    if (kl := finite(record, "kl")) is None:
        return None
    evidence = f"KL to the reference is {kl:.3g} nats a token (limit {limits.limit:g})"
    return CheckResult(kl > limits.limit, evidence, "lower the learning rate or raise kl_coef")


def mismatch_growth(limits: MismatchGrowth, state: CheckState, record: Record) -> CheckResult | None:
    """The sampler's log-probabilities drift from the trainer's."""
    if (mismatch := finite(record, "logprob_mismatch")) is None:
        return None
    baseline = min(state.first("mismatch", mismatch, limits.baseline_steps))
    limit = max(limits.factor * baseline, limits.floor)
    evidence = (
        f"log-probabilities of sampler and trainer differ by up to {mismatch:.3g} nats (limit {limit:.3g}, at the "
        f"start {baseline:.3g}): the sampler does not hold the policy's weights"
    )
    return CheckResult(mismatch > limit, evidence, "check how weights reach the sampler, then resume")


def length_explosion(limits: LengthExplosion, state: CheckState, record: Record) -> CheckResult | None:
    """Completions grow and are cut at the maximum length."""
    truncated, tokens = finite(record, "truncated_share"), finite(record, "completion_tokens")
    if truncated is None:
        return None
    cut_before = state.last("truncated", truncated, limits.window)
    bad, evidence = truncated >= limits.truncated_limit, f"{truncated:.0%} of completions are cut off"
    evidence += f" (limit {limits.truncated_limit:.0%})" if bad else ""
    if tokens is not None:
        before = state.last("tokens", tokens, limits.window)
        if len(before) == len(cut_before) == limits.window:
            limit, cut_limit = limits.factor * median(before), median(cut_before) + limits.truncated_rise
            evidence += (
                f", mean length is {tokens:.4g} tokens (limit {limit:.4g} where over {cut_limit:.0%} are cut off)"
            )
            bad |= tokens > limit and truncated > cut_limit
    return CheckResult(bad, evidence, "raise max_new_tokens, penalize length, or look for repetition in the samples")


def entropy_collapse(limits: EntropyCollapse, state: CheckState, record: Record) -> CheckResult | None:
    """The policy's entropy has fallen to a small share of its start."""
    if (entropy := finite(record, "entropy", "sampled_entropy")) is None:
        return None
    early = state.first("entropy", entropy, limits.baseline_steps)
    limit = max(limits.share * median(early), limits.floor)
    evidence = f"entropy is {entropy:.3g} nats a token (limit {limit:.3g}, at the start {median(early):.3g})"
    return CheckResult(entropy < limit, evidence, "raise clip_eps_high or kl_coef, or lower the learning rate")


def reward_collapse(limits: RewardCollapse, state: CheckState, record: Record) -> CheckResult | None:
    """The reward has fallen from its best level."""
    if (reward := finite(record, "reward")) is None:
        return None
    values = [*state.last("reward", reward, limits.window), reward][-limits.window :]
    if len(values) < limits.window:
        return None
    mean = fmean(values)
    best = state.best = mean if state.best is None else max(state.best, mean)
    limit = best - max(limits.share * abs(best), limits.floor)
    evidence = f"mean reward of {limits.window} steps fell to {mean:.3g} (limit {limit:.3g}, best {best:.3g})"
    advice = "look at the samples and the parts of the reward; lower the learning rate or raise kl_coef"
    return CheckResult(mean < limit, evidence, advice)


def gradient_spike(limits: GradientSpike, state: CheckState, record: Record) -> CheckResult | None:
    """The gradient norm is far above its recent median."""
    if (norm := finite(record, "grad_norm")) is None:
        return None
    before = state.last("norm", norm, limits.window)
    if len(before) < limits.window:
        return None
    limit = max(limits.factor * median(before), limits.floor)
    evidence = f"gradient norm is {norm:.3g} (limit {limit:.3g}, usually {median(before):.3g})"
    return CheckResult(norm > limit, evidence, "keep max_grad_norm low; if it returns, lower the learning rate")


CHECKS: dict[str, Check] = {
    "not_finite": not_finite,
    "variance_collapse": variance_collapse,
    "kl_blow_up": kl_blow_up,
    "mismatch_growth": mismatch_growth,
    "length_explosion": length_explosion,
    "entropy_collapse": entropy_collapse,
    "reward_collapse": reward_collapse,
    "gradient_spike": gradient_spike,
    "kl_budget": kl_budget,
    "rule_accuracy": rule_accuracy,
}
"""Checks by name. Each check's settings are the field of `HealthSettings` with the same name."""


class Health:
    """Checks one record per step. A failure is reported when it begins, and again only after it has ended."""

    def __init__(self, settings: HealthSettings):
        self.recovery_steps = settings.recovery_steps
        limits: dict[str, CheckSettings] = {name: getattr(settings, name) for name in CHECKS}
        self.limits = {name: check for name, check in limits.items() if check.action != "ignore"}
        self.states = {name: CheckState() for name in self.limits}

    def check(self, step: int, record: Record) -> list[HealthEvent]:
        """Failures that begin at this step, in the order of CHECKS. Skips a check whose metrics are missing."""
        return [event for name in self.limits if (event := self._check(name, step, record))]

    def _check(self, name: str, step: int, record: Record) -> HealthEvent | None:
        limits, state = self.limits[name], self.states[name]
        result = CHECKS[name](limits, state, record)
        if result is None:
            return None
        state.bad = state.bad + 1 if result.bad else 0
        state.good = 0 if result.bad else state.good + 1
        if state.good >= self.recovery_steps:
            state.said = False
        if state.said or state.bad < limits.steps:
            return None
        state.said = True
        since = f", {state.bad} times in a row" if state.bad > 1 else ""
        return HealthEvent(name, limits.action, f"step {step}: {result.evidence}{since}; {result.advice}", step)

    @property
    def good(self) -> bool:
        """Whether a checkpoint written now is suitable for a rollback: no check that triggers a rollback sees bad
        values."""
        return not any(self.states[name].bad for name, limits in self.limits.items() if limits.action == "roll_back")

    def state(self) -> dict[str, Any]:
        """State of every check as plain numbers, lists and dicts, for a checkpoint."""
        return {name: asdict(state) for name, state in self.states.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`. A check that was disabled when the state was written starts from scratch."""
        self.states = {name: CheckState(**deepcopy(state.get(name, {}))) for name in self.limits}
