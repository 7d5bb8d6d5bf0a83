"""Metrics and printed samples of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo.processes.metrics_log import closing_means
from grpo.rl.batch import CompletionGroup
from grpo.rl.credit import teach_nothing
from grpo.scoring.agreement import agreement
from grpo.scoring.reward_weights import branch_parts
from grpo.scoring.scorer import Failures

_FAILURES_OF_KIND = "reward_failures_"


def metrics_of(groups: list[CompletionGroup], failures: Failures, weights: Mapping[str, float]) -> dict[str, float]:
    """Metrics over all groups sampled for a rollout. `weights`: weight of each reward."""
    completions = [c for g in groups for c in g.completions]
    return _reward_means(groups, weights) | {
        "zero_variance_share": _mean([teach_nothing(group) for group in groups]),
        "completion_tokens": _mean([len(c.tokens) for c in completions]),
        "truncated_share": _mean([not c.finished for c in completions]),
        **agreement((group.problem, given) for group in groups for given in group.given),
        "reward_failures": float(failures.kinds.total()),
        **{f"{_FAILURES_OF_KIND}{kind}": float(count) for kind, count in sorted(failures.kinds.items())},
    }


def kept_metrics(groups: list[CompletionGroup], weights: Mapping[str, float]) -> dict[str, float]:
    """Metrics over the groups that dynamic sampling kept: their rewards, which are biased as an estimate of the policy,
    and the share of them that still teach nothing."""
    kept = {f"kept_{name}": value for name, value in _reward_means(groups, weights).items()}
    return kept | {"zero_variance_share": _mean([teach_nothing(group) for group in groups])}


def _reward_means(groups: list[CompletionGroup], weights: Mapping[str, float]) -> dict[str, float]:
    """Means over completions, by reward and, if there are several domains, by domain."""
    rewards = [reward for group in groups for reward in group.rewards.tolist()]
    metrics = {"reward": _mean(rewards)} | _component_means("reward_", groups, weights)
    domains = {g.problem.domain for g in groups}
    for domain in sorted(domains) if len(domains) > 1 else []:
        of_domain = [g for g in groups if g.problem.domain == domain]
        metrics[f"{domain}_reward"] = _mean([r for g in of_domain for r in g.rewards.tolist()])
        metrics |= _component_means(f"{domain}_reward_", of_domain, weights)
    return metrics


def samples_of(groups: list[CompletionGroup], advantages: list[Tensor], step: int) -> list[dict[str, Any]]:
    """Samples of a rollout's first groups, for people to read. `advantages` starts with the advantages of these
    groups."""
    kept: list[dict[str, Any]] = []
    for group in groups:
        for response, breakdown, reward in zip(group.responses, group.breakdowns, group.rewards.tolist(), strict=True):
            kept.append(
                {
                    "step": step,
                    "problem": group.problem.text,
                    "gold": group.problem.answer,
                    "completion": response.text,
                    "reward": reward,
                    "advantage": advantages[len(kept)][0].item(),
                    **breakdown,
                }
            )
    return kept


def _component_means(prefix: str, groups: list[CompletionGroup], weights: Mapping[str, float]) -> dict[str, float]:
    breakdowns = [b for g in groups for b in g.breakdowns]
    names = sorted({name for b in breakdowns for name in b})
    means = {name: _mean([b[name] for b in breakdowns if name in b]) for name in names}
    return {prefix + name: value for name, value in (means | branch_parts(breakdowns, weights)).items()}


def kl_of(groups: list[CompletionGroup]) -> dict[str, float]:
    """KL to the reference in nats per completion: mean of log pi - log pi_ref over the policy's own samples, summed
    over tokens (k1, unbiased). Empty without a reference."""
    ratios = [
        sum(completion.logprobs) - reference.sum().item()
        for group in groups
        if group.ref_logprobs is not None
        for completion, reference in zip(group.completions, group.ref_logprobs, strict=True)
    ]
    return {"kl_completion": _mean(ratios)} if ratios else {}


def closing_metrics(metrics: Path) -> dict[str, float]:
    """The metrics of a job's result: means over its last steps. A step has only the kinds of failures that occurred."""
    return closing_means(metrics, _is_closing, counts=lambda name: name.startswith(_FAILURES_OF_KIND))


def _is_closing(name: str) -> bool:
    return name.startswith("reward") or name in ("kl", "kl_completion", "sampled_entropy", "completion_tokens")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
