"""The recipe section of the evaluation."""

from __future__ import annotations

from pydantic import Field, model_validator

from flows.recipe.sections import Section
from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.config.judge import JudgeSettings
from tasks.evaluation.sets.settings import EvaluationSet, check_sets


class Evaluate(Section):
    """Every checkpoint on the held-out problems (R1: temperature 0.6, top-p 0.95, pass@1 over k samples)."""

    samples_per_problem: int = Field(4, ge=1, description="Samples a problem (k): pass@1 is their mean. R1: 16 or 64.")
    k: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="k of pass@k and cons@k, at most samples_per_problem. cons@k is the mean over groups of k samples. "
        "None: as many as there are samples. R1: 64 for AIME 2024.",
    )
    sets: list[EvaluationSet] = Field(
        [],
        exclude_if=lambda value: not value,
        description="Test sets beside the held-out problems, each with rows of its own in the closing table.",
    )
    problems: int = Field(256, ge=1, description="Most held-out reasoning problems.")
    general: int = Field(
        0,
        ge=0,
        description="Most held-out general prompts; they measure the alignment reward, refusals, instructions followed "
        "and the win rate.",
    )
    general_samples: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="Samples of each general prompt, where many prompts say more than many samples. None: "
        "samples_per_problem.",
    )
    judge: JudgeSettings = Field(
        JudgeSettings(),
        description="Compares with Dev3 and recognises refusals. Of its own, so that it is not what was rewarded.",
    )
    sampling: Sampling
    engine: VLLM | None = Field(
        None,
        exclude_if=lambda engine: engine is None,
        description="vLLM samples, in this process or at a server that is given the weights of each checkpoint in "
        "turn. None: as hardware.sampler says. An endpoint serves one model, so it cannot be here.",
    )
    hardware: Hardware = Hardware()
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the intervals, over problems (bootstrap).")

    @model_validator(mode="after")
    def _k_is_sampled(self) -> Evaluate:
        if self.k is not None and self.k > self.samples_per_problem:
            raise ValueError(f"k is {self.k}, above samples_per_problem ({self.samples_per_problem}); lower it")
        check_sets(self.sets, self.samples_per_problem)
        return self
