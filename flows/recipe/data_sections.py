"""Recipe sections of the stages that make training data: cold-start demonstrations, and rejection sampling.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from flows.recipe.sections import Section
from grpo.config.common import Hardware, RayCluster, Sampling, WholeSequences
from grpo.config.engines import TextEngineSettings, check_shards
from grpo.config.judge import JudgeSettings
from grpo.config.scoring import Scoring
from tasks.problems.miniature.writers import Habits
from tasks.sft_data.filters import DemonstrationFilters, FilterSettings
from tasks.sft_data.mix_settings import MixSettings
from tasks.sft_data.teacher.settings import Teacher


class ColdStartData(Section):
    """Demonstrations of the format: few, correct, readable (R1, stage 1)."""

    source: Literal["solutions", "miniature", "sampled", "r1_zero"] = Field(
        description="solutions: worked solutions that came with the problems (GSM8K). miniature: the miniature "
        "world's writers. sampled: the base model's own completions. r1_zero: R1-Zero's, rewritten, as in the paper."
    )
    problems: int = Field(ge=1, description="Reasoning problems to demonstrate. R1: thousands.")
    general: int = Field(0, ge=0, description="General prompts to demonstrate (miniature, solutions).")
    habits: Habits | None = Field(
        None, description="How the miniature's writers behave (miniature; r1_zero, if they rewrite)."
    )
    samples_per_problem: int = Field(4, ge=1, description="Completions sampled per problem (sampled, r1_zero).")
    sampling: Sampling | None = Field(None, description="How they are sampled. R1: temperature 1 (sampled, r1_zero).")
    engine: TextEngineSettings | None = Field(
        None,
        exclude_if=lambda engine: engine is None,
        description="Sampling engine: vLLM (local, server), or an endpoint that serves the model (sampled, r1_zero). "
        "None: as hardware.sampler says.",
    )
    rewriter: Teacher | None = Field(
        None,
        exclude_if=lambda teacher: teacher is None,
        description="Model that rewrites R1-Zero's trajectories into readable reasoning and a summary; placeholders "
        "in its instruction: {question}, {trajectory}, {form}. None: the miniature's writer (habits). R1: DeepSeek-V3.",
    )
    hardware: WholeSequences = Hardware()
    filters: DemonstrationFilters = Field(
        default_factory=DemonstrationFilters,  # a default in the form would hold the fields that it leaves out
        description="Filters for unreadable demonstrations.",
    )

    @model_validator(mode="after")
    def _source_is_complete(self) -> ColdStartData:
        if self.source == "miniature" and self.habits is None:
            raise ValueError("source 'miniature' needs habits")
        if self.source in ("sampled", "r1_zero") and self.sampling is None:
            raise ValueError(f"source {self.source!r} needs sampling")
        if self.source not in ("sampled", "r1_zero") and self.engine is not None:
            raise ValueError(f"source {self.source!r} samples nothing; leave engine out")
        if self.source == "r1_zero" and (self.rewriter is None) == (self.habits is None):
            raise ValueError("source 'r1_zero' needs a rewriter, or in the miniature world habits; give one of them")
        if self.source != "r1_zero" and self.rewriter is not None:
            raise ValueError("a rewriter rewrites R1-Zero's trajectories; set source to 'r1_zero', or leave it out")
        if self.source not in ("miniature", "solutions") and self.general:
            raise ValueError("general demonstrations come from sources 'miniature' and 'solutions'; set general to 0")
        check_shards(self.engine, self.hardware)
        if self.rewriter is not None:
            check_shards(self.rewriter.engine, self.hardware)
        return self


class SFTData(Section):
    """Rejection sampling from the reasoning policy, and general data (R1, stage 3a: 600k + 200k)."""

    problems: int = Field(ge=1, description="Reasoning problems to sample.")
    general: int = Field(0, ge=0, description="General prompts to sample.")
    samples_per_problem: int = Field(4, ge=1, description="Completions per prompt. Unpublished.")
    enough_right: int | None = Field(
        None,
        ge=1,
        description="Reasoning problems with fewer correct completions get samples_per_problem more at a time. None: "
        "no more.",
    )
    samples_max: int = Field(64, ge=1, description="Maximum completions per prompt that is sampled again.")
    keep_per_problem: int = Field(2, ge=1, description="Maximum accepted completions per prompt. Unpublished.")
    sampling: Sampling
    sampling_by_source: dict[str, Sampling] = Field(
        {}, description="Replaces `sampling` for problems of these sources."
    )
    engine: TextEngineSettings | None = Field(
        None,
        description="Sampling engine: vLLM (local, server), an OpenAI-compatible endpoint. None: as hardware.sampler "
        "says.",
    )
    teacher: Teacher | None = Field(
        None,
        exclude_if=lambda teacher: teacher is None,
        description="Answers the general prompts instead of the policy, with a chain of thought; mix.think says which "
        "sources keep it. Placeholders in its instruction: {question}, {form}. None: the policy. R1: DeepSeek-V3.",
    )
    rewards: list[str] = Field(
        ["accuracy", "format", "language"],
        description="Rule-based rewards computed for every sample; the filters read these.",
    )
    scoring: Scoring = Scoring()
    shard_problems: int = Field(
        2000, ge=1, description="Problems per shard, the unit that is sampled, filtered and cached for later runs."
    )
    hardware: WholeSequences = Hardware()
    ray: RayCluster | None = Field(
        None,
        description="Distribute shards over a Ray cluster (pip install 'r1flow[ray]'), not `hardware`'s processes.",
    )
    filters: FilterSettings = FilterSettings()
    judge: JudgeSettings = Field(
        JudgeSettings(),
        description="Judges what the rules accept: answers against their reference, general responses for safety.",
    )
    judged: list[Literal["reasoning", "general", "quality"]] = Field(
        ["reasoning", "general"],
        description="What the judge checks after the rules: whether a reasoning answer is correct, whether a general "
        "response is safe, and whether it is good enough to train on (quality).",
    )
    mix: MixSettings = Field(MixSettings(), description="How the accepted samples form the data set.")

    @model_validator(mode="after")
    def _shards_are_taken_alone(self) -> SFTData:
        check_shards(self.engine, self.hardware, self.ray)
        if self.teacher is not None:
            check_shards(self.teacher.engine, self.hardware, self.ray)
        return self
