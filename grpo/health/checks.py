"""Named failures of RL training, seen in the metrics of each step and said in plain words.

No torch here: a record is one line of metrics.jsonl. Limits marked "ours" were set so that recorded runs of the tiny
recipe (50 to 120 steps each, reward and entropy on the move) raise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from pydantic import Field

from grpo.health.base import Action, AgainstRecent, Check, Finding, Memory, Reading, Record, Watch, finite
from grpo.health.guards import KLBudget, RuleAccuracy, kl_budget, rule_accuracy
from grpo.settings import Settings


class NotFinite(Watch):
    action: Action = Field(
        "roll_back",
        description="NaN stays in weights and Adam moments, so that going on is vain; other samples mostly pass. Ours.",
    )


class VarianceCollapse(Watch):
    steps: int = Field(10, ge=1, description="Steps in a row. R1-Zero can begin with a few, nearly all wrong. Ours.")
    limit: float = Field(0.9, gt=0, le=1, description="Share of groups with equal rewards, at or above. Ours.")
    baseline_steps: int = Field(10, ge=1, description="First steps whose median reward is the start's. Ours.")


class KLBlowUp(Watch):
    steps: int = Field(5, ge=1, description="Steps in a row: the k3 mean has heavy tails, one step may show 8. Ours.")
    limit: float = Field(1.0, gt=0, description="Nats a token, above. Healthy runs here: below 0.2. Ours.")


class MismatchGrowth(Watch):
    action: Action = Field("stop", description="Every further step learns from wrong ratios; rolling back is no cure.")
    steps: int = Field(3, ge=1, description="Rollouts in a row: the metric is a maximum over tokens. Ours.")
    factor: float = Field(5.0, gt=1, description="Times the baseline, above. TRL issue 5312 (a mean): 13. Ours.")
    floor: float = Field(0.1, ge=0, description="Nats, above. Rounding: 1e-5 in float32, far more in bfloat16. Ours.")
    baseline_steps: int = Field(5, ge=1, description="First rollouts whose smallest value is the baseline. Ours.")


class LengthExplosion(AgainstRecent):
    steps: int = Field(5, ge=1, description="Steps in a row. Ours.")
    factor: float = Field(2.0, gt=1, description="Mean tokens above so many times the usual, and truncation up. Ours.")
    truncated_rise: float = Field(0.1, ge=0, le=1, description="Share of cut-off completions above the usual. Ours.")
    truncated_limit: float = Field(0.5, gt=0, le=1, description="A share at or above is bad at any length. Ours.")


class EntropyCollapse(Watch):
    steps: int = Field(10, ge=1, description="Steps in a row. Ours.")
    share: float = Field(0.05, ge=0, lt=1, description="Of the baseline, below. Healthy runs here: 0.16. Ours.")
    floor: float = Field(0.002, ge=0, description="Nats a token; below it whatever the baseline. Ours.")
    baseline_steps: int = Field(10, ge=1, description="First steps whose median is the baseline. Ours.")


class RewardCollapse(Watch):
    share: float = Field(0.3, gt=0, description="Fall of the running mean from its best over the best's size. Ours.")
    floor: float = Field(0.1, ge=0, description="Units of reward; a smaller fall is noise. Ours.")
    window: int = Field(10, ge=1, description="Steps of the running mean. Ours.")


class GradientSpike(AgainstRecent):
    factor: float = Field(10.0, gt=1, description="Times the usual norm, unclipped, above. Healthy here: 2.5. Ours.")
    floor: float = Field(1.0, ge=0, description="Norm, above: a smaller one is hardly clipped. Ours.")


class HealthSettings(Settings):
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
    max_roll_backs: int = Field(2, ge=0, description="After so many, a roll back becomes a stop. Ours.")
    recovery_steps: int = Field(5, ge=1, description="Good values in a row until a failure has ended. Ours.")


def not_finite(limits: NotFinite, memory: Memory, record: Record) -> Reading | None:
    watched = [name for name in ("loss", "grad_norm", "reward", "kl") if name in record]
    broken = [f"{name} is {record[name]}" for name in watched if not math.isfinite(record[name])]
    advice = "lower the learning rate, or compute in float32 rather than bfloat16"
    return Reading(bool(broken), f"{', '.join(broken)} (must be finite)", advice) if watched else None


def variance_collapse(limits: VarianceCollapse, memory: Memory, record: Record) -> Reading | None:
    share, reward = finite(record, "zero_variance_share"), finite(record, "reward")
    if share is None:
        return None
    seen = f"{share:.0%} of groups have equal rewards (limit {limits.limit:.0%}), so that they teach nothing"
    advice = "ask harder problems if they are solved, easier ones if not"
    if reward is not None:
        early = median(memory.first("reward", reward, limits.baseline_steps))
        if math.isclose(reward, early, rel_tol=0.1, abs_tol=0.05):
            seen += f"; mean reward {reward:.3g} is what it was at the start: the problems are too easy or too hard"
        elif reward > early:
            seen += f"; mean reward rose from {early:.3g} to {reward:.3g}: nearly all right"
            advice = "ask harder problems, or end here"
        else:
            seen += f"; mean reward fell from {early:.3g} to {reward:.3g}: nearly all wrong"
            advice = "go back to an earlier checkpoint, lower the learning rate, and look at the samples"
    return Reading(share >= limits.limit, seen, advice)


def kl_blow_up(limits: KLBlowUp, memory: Memory, record: Record) -> Reading | None:
    if (kl := finite(record, "kl")) is None:
        return None
    seen = f"KL to the reference is {kl:.3g} nats a token (limit {limits.limit:g})"
    return Reading(kl > limits.limit, seen, "lower the learning rate or raise kl_coef")


def mismatch_growth(limits: MismatchGrowth, memory: Memory, record: Record) -> Reading | None:
    if (mismatch := finite(record, "logprob_mismatch")) is None:
        return None
    baseline = min(memory.first("mismatch", mismatch, limits.baseline_steps))
    limit = max(limits.factor * baseline, limits.floor)
    seen = (
        f"log-probabilities of sampler and trainer differ by up to {mismatch:.3g} nats (limit {limit:.3g}, at the "
        f"start {baseline:.3g}): the sampler does not hold the policy's weights"
    )
    return Reading(mismatch > limit, seen, "check how weights reach the sampler, then resume")


def length_explosion(limits: LengthExplosion, memory: Memory, record: Record) -> Reading | None:
    truncated, tokens = finite(record, "truncated_share"), finite(record, "completion_tokens")
    if truncated is None:
        return None
    cut_before = memory.last("truncated", truncated, limits.window)
    bad, seen = truncated >= limits.truncated_limit, f"{truncated:.0%} of completions are cut off"
    seen += f" (limit {limits.truncated_limit:.0%})" if bad else ""
    if tokens is not None:
        before = memory.last("tokens", tokens, limits.window)
        if len(before) == len(cut_before) == limits.window:
            limit, cut_limit = limits.factor * median(before), median(cut_before) + limits.truncated_rise
            seen += f", mean length is {tokens:.4g} tokens (limit {limit:.4g} where over {cut_limit:.0%} are cut off)"
            bad |= tokens > limit and truncated > cut_limit
    return Reading(bad, seen, "raise max_new_tokens, penalize length, or look for repetition in the samples")


def entropy_collapse(limits: EntropyCollapse, memory: Memory, record: Record) -> Reading | None:
    if (entropy := finite(record, "entropy", "sampled_entropy")) is None:
        return None
    early = memory.first("entropy", entropy, limits.baseline_steps)
    limit = max(limits.share * median(early), limits.floor)
    seen = f"entropy is {entropy:.3g} nats a token (limit {limit:.3g}, at the start {median(early):.3g})"
    return Reading(entropy < limit, seen, "raise clip_eps_high or kl_coef, or lower the learning rate")


def reward_collapse(limits: RewardCollapse, memory: Memory, record: Record) -> Reading | None:
    if (reward := finite(record, "reward")) is None:
        return None
    values = [*memory.last("reward", reward, limits.window), reward][-limits.window :]
    if len(values) < limits.window:
        return None
    mean = fmean(values)
    best = memory.best = mean if memory.best is None else max(memory.best, mean)
    limit = best - max(limits.share * abs(best), limits.floor)
    seen = f"mean reward of {limits.window} steps fell to {mean:.3g} (limit {limit:.3g}, best {best:.3g})"
    advice = "look at the samples and the parts of the reward; lower the learning rate or raise kl_coef"
    return Reading(mean < limit, seen, advice)


def gradient_spike(limits: GradientSpike, memory: Memory, record: Record) -> Reading | None:
    if (norm := finite(record, "grad_norm")) is None:
        return None
    before = memory.last("norm", norm, limits.window)
    if len(before) < limits.window:
        return None
    limit = max(limits.factor * median(before), limits.floor)
    seen = f"gradient norm is {norm:.3g} (limit {limit:.3g}, usually {median(before):.3g})"
    return Reading(norm > limit, seen, "keep max_grad_norm low; if it returns, lower the learning rate")


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
"""Each with the settings of the same name."""


class Health:
    """Looks at one record a step. A failure is said when it begins, and again only after it has ended."""

    def __init__(self, settings: HealthSettings):
        self.recovery_steps = settings.recovery_steps
        watches: dict[str, Watch] = {name: getattr(settings, name) for name in CHECKS}
        self.watches = {name: watch for name, watch in watches.items() if watch.action != "ignore"}
        self.memories = {name: Memory() for name in self.watches}

    def check(self, step: int, record: Record) -> list[Finding]:
        """What begins at this step, in the order of CHECKS; a check whose metrics are missing says nothing."""
        return [f for name, watch in self.watches.items() if (f := self._check(name, watch, step, record))]

    def _check(self, name: str, watch: Watch, step: int, record: Record) -> Finding | None:
        memory = self.memories[name]
        reading = CHECKS[name](watch, memory, record)
        if reading is None:
            return None
        memory.bad = memory.bad + 1 if reading.bad else 0
        memory.good = 0 if reading.bad else memory.good + 1
        if memory.good >= self.recovery_steps:
            memory.said = False
        if memory.said or memory.bad < watch.steps:
            return None
        memory.said = True
        since = f", {memory.bad} times in a row" if memory.bad > 1 else ""
        return Finding(name, watch.action, f"step {step}: {reading.seen}{since}; {reading.advice}", step)

    @property
    def good(self) -> bool:
        """Whether a checkpoint of now is one to roll back to: nothing is on its way to a roll back."""
        return not any(self.memories[name].bad for name, watch in self.watches.items() if watch.action == "roll_back")

    def state(self) -> dict[str, Any]:
        """Baselines, windows and what has been said, as plain numbers, lists and dicts."""
        return {name: asdict(memory) for name, memory in self.memories.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. A failure that was ignored when it was written begins anew."""
        self.memories = {name: Memory(**deepcopy(state.get(name, {}))) for name in self.watches}
