"""The recipe section of the evaluation."""

from __future__ import annotations

from pydantic import Field, model_validator

from flows.recipe.sections import Section
from grpo.config.common import Hardware, Sampling, WholeSequences
from grpo.config.engines import VLLM, check_shards
from grpo.config.judge import JudgeSettings
from tasks.evaluation.sets.settings import EvaluationSet, check_sets


class Evaluate(Section):
    """Every checkpoint on the held-out problems (R1: temperature 0.6, top-p 0.95, pass@1 over k samples)."""

    samples_per_problem: int = Field(
        4, ge=1, description="Samples per problem (k): pass@1 is their mean. R1: 16 or 64."
    )
    k: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="k of pass@k and cons@k, at most samples_per_problem. cons@k is averaged over groups of k "
        "samples. None: the number of samples. R1: 64 for AIME 2024.",
    )
    sets: list[EvaluationSet] = Field(
        [],
        exclude_if=lambda value: not value,
        description="Test sets besides the held-out problems, each with its own rows in the closing table.",
    )
    problems: int = Field(256, ge=1, description="Maximum held-out reasoning problems.")
    general: int = Field(
        0,
        ge=0,
        description="Maximum held-out general prompts; they measure alignment reward, refusals, instruction following "
        "and win rate.",
    )
    general_samples: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="Samples per general prompt, if more prompts tell more than more samples. None: "
        "samples_per_problem.",
    )
    judge: JudgeSettings = Field(
        JudgeSettings(),
        description="Compares responses with Dev3's and detects refusals. Separate, so that it is not what gave "
        "rewards.",
    )
    sampling: Sampling
    engine: VLLM | None = Field(
        None,
        exclude_if=lambda engine: engine is None,
        description="vLLM for sampling, in this process or on a server that receives each checkpoint's weights in "
        "turn. None: as hardware.sampler says. Not an endpoint, which serves only one model.",
    )
    alignment_scores: bool = Field(
        True,
        exclude_if=bool,
        description="Whether the reward models score general responses, if there are any. Each process holds both "
        "whole, beside the policy.",
    )
    hardware: WholeSequences = Hardware()
    confidence: float = Field(
        0.95, gt=0, lt=1, description="Level of the confidence intervals (bootstrap over problems)."
    )

    @model_validator(mode="after")
    def _k_is_sampled(self) -> Evaluate:
        if self.k is not None and self.k > self.samples_per_problem:
            raise ValueError(f"k is {self.k}, above samples_per_problem ({self.samples_per_problem}); lower it")
        check_sets(self.sets, self.samples_per_problem)
        check_shards(self.engine, self.hardware)
        return self
