"""Guards against reward hacking: how far a policy may go from its reference, and what it may not unlearn on the way.

A learnt reward is right near the responses that it was trained on. Against it a policy gains for a while, and then
learns what the model gets wrong: the true reward falls while the learnt one rises, the further from the reference the
more (arXiv 2210.10760 measures it by this KL). Neither guard does anything until its limit is set.
"""

from __future__ import annotations

from statistics import fmean

from pydantic import Field

from grpo.health.base import CheckResult, CheckSettings, CheckState, Record, finite


class KLBudget(CheckSettings):
    steps: int = Field(3, ge=1, description="Steps in a row: few completions make a noisy mean. Ours.")
    limit: float | None = Field(
        None,
        gt=0,
        description="Nats a completion to the reference, mean, above. It grows with length: 0.05 a token is 5 for 100. "
        "A refreshed reference starts it anew; methods other than grpo and ppo measure no KL. None: no budget.",
    )


class RuleAccuracy(CheckSettings):
    points: float | None = Field(
        None, gt=0, le=100, description="Percentage points that accuracy may fall, moving mean. None: not watched."
    )
    window: int = Field(10, ge=1, description="Steps of the moving mean; the first so many are the start's. Ours.")


def kl_budget(limits: KLBudget, state: CheckState, record: Record) -> CheckResult | None:
    kl = finite(record, "kl_completion")
    if kl is None or limits.limit is None:
        return None
    evidence = f"KL to the reference is {kl:.3g} nats a completion (budget {limits.limit:g})"
    advice = "end here or raise kl_coef: reward models only guess about responses unlike those they learnt from"
    return CheckResult(kl > limits.limit, evidence, advice)


def rule_accuracy(limits: RuleAccuracy, state: CheckState, record: Record) -> CheckResult | None:
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
