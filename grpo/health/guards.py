"""Guards against reward hacking: how far the policy may move from its reference, and how much accuracy it may lose.

A learned reward model is accurate near the responses it was trained on. A policy optimized against it improves for a
while and then exploits its errors: the true reward falls while the learned one rises. The effect grows with the
policy's distance from its reference (arXiv 2210.10760 measures it by the KL used here). A guard acts only if its limit
is set.
"""

from __future__ import annotations

from collections.abc import Container
from statistics import fmean

from pydantic import Field

from grpo.health.base import CheckResult, CheckSettings, CheckState, Record, finite


class KLBudget(CheckSettings):
    """KL to the reference, per completion, exceeds a budget."""

    steps: int = Field(3, ge=1, description="Consecutive steps: the mean over few completions is noisy. Ours.")
    limit: float | None = Field(
        None,
        gt=0,
        description="Largest mean KL to the reference, nats per completion. It grows with length: 0.05 per token is 5 "
        "for 100 tokens. Refreshing the reference resets it; only grpo and ppo measure KL. None: no budget.",
    )

    def check(self, method: str) -> None:
        """Raises ValueError if the limit is set and an RL method does not measure KL."""
        if self.limit is not None and method not in ("grpo", "ppo"):
            raise ValueError(f"health.kl_budget.limit is for grpo and ppo; {method!r} measures no KL, so leave it out")


class RuleAccuracy(CheckSettings):
    """Accuracy on verifiable problems falls below that of the first steps."""

    points: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Largest fall of the moving mean of accuracy, percentage points. None: no guard.",
    )
    window: int = Field(10, ge=1, description="Steps of the moving mean; the first window is the baseline. Ours.")

    def check(self, rewards: Container[str], given: bool, only_general: bool) -> None:
        """Raises ValueError if the limit is set and RL with these `rewards` does not measure accuracy. `given`: its
        data are not sampled. `only_general`: it asks no reasoning problems."""
        if self.points is None:
            return
        if given:
            raise ValueError("health.rule_accuracy.points needs sampled completions; sft and dpo.files have none")
        if "accuracy" not in rewards:
            raise ValueError("health.rule_accuracy.points needs accuracy in rewards; 0 watches it without reward")
        if only_general:
            raise ValueError("health.rule_accuracy.points needs reasoning prompts; general_share is 1 throughout")


def kl_budget(limits: KLBudget, state: CheckState, record: Record) -> CheckResult | None:
    """The KL of a whole completion exceeds its budget."""
    kl = finite(record, "kl_completion")
    if kl is None or limits.limit is None:
        return None
    evidence = f"KL to the reference is {kl:.3g} nats a completion (budget {limits.limit:g})"
    advice = "end here or raise kl_coef: reward models only guess about responses unlike those they learnt from"
    return CheckResult(kl > limits.limit, evidence, advice)


def rule_accuracy(limits: RuleAccuracy, state: CheckState, record: Record) -> CheckResult | None:
    """The rule-based accuracy has fallen below that of the first steps."""
    accuracy = finite(record, "reward_accuracy")
    if accuracy is None or limits.points is None:
        return None
    start = state.first("accuracy", accuracy, limits.window)
    values = [*state.last("accuracy", accuracy, limits.window), accuracy][-limits.window :]
    if len(values) < limits.window:
        return None
    fall = 100 * (fmean(start) - fmean(values))
    evidence = (
        f"reasoning accuracy, mean of {limits.window} steps, is {fmean(values):.1%}, at the start {fmean(start):.1%}: "
        f"{fall:.1f} points lower (allowed {limits.points:g})"
    )
    advice = "ask fewer general prompts, or for fewer steps, or weigh the preference branch less"
    return CheckResult(fall > limits.points, evidence, advice)
