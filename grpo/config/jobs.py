"""The jobs that `python -m grpo.train` runs: settings, and the files that they read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from grpo.config.common import Hardware, RayCluster, Sampling, WholeSequences
from grpo.config.engines import TextEngineSettings, check_shards
from grpo.config.judge import JudgeSettings
from grpo.config.rl import RL, STEP_MODEL
from grpo.config.scoring import Scoring
from grpo.config.supervised import SFT, Pretrain, ProcessRewardModel, RewardModel
from grpo.data.template import Template
from grpo.settings import Settings

MEMBER = "member-"
"""Prefix of the folders of an ensemble's models."""


class JobBase(Settings):
    """Fields of every job. Paths are local; `out` becomes the artifact, `state` is only for resuming."""

    out: Path
    state: Path
    metrics: Path
    result: Path
    seed: int = Field(ge=0, le=2**53)

    @property
    def where(self) -> Hardware:
        """The job's own hardware settings, or those in `settings`."""
        own: Hardware = self.hardware if hasattr(self, "hardware") else self.settings.hardware  # type: ignore[attr-defined]
        return own


class PretrainJob(JobBase):
    """Pretrain a model from scratch."""

    kind: Literal["pretrain"] = "pretrain"
    settings: Pretrain
    corpus: Path = Field(description="A text file, documents separated by blank lines.")


class SFTJob(JobBase):
    """Fine-tune a model on completions."""

    kind: Literal["sft"] = "sft"
    settings: SFT
    model: str
    data: Path = Field(description="Parquet shards with columns prompt and completion, both conversations.")
    validation_data: Path | None = Field(
        None, description="Data for validate_every, with the same columns. None: a share of `data`."
    )


class RewardModelJob(JobBase):
    """Train a reward model on preference pairs or labels."""

    kind: Literal["reward_model"] = "reward_model"
    settings: RewardModel
    model: str
    data: Path = Field(
        description="Parquet: prompt, chosen, rejected and optionally strength (pairs) or prompt, completion, label "
        "(points); held_out marks rows used only for evaluation."
    )
    loss: Literal["pairs", "points"]
    bootstrap: bool = Field(False, description="Train on as many prompts, drawn with replacement using the seed.")

    @model_validator(mode="after")
    def _points_have_no_pairs(self) -> RewardModelJob:
        if self.loss == "points" and (self.settings.margin or self.settings.centring):
            raise ValueError("margin and centring are for pairs; leave them out where loss is 'points'")
        return self


class StepLabelsJob(JobBase):
    """Estimate how often each step of given chains leads to a correct answer: data for a process reward model."""

    kind: Literal["step_labels"] = "step_labels"
    model: str = Field(description="Continues the chains: a policy with a chat template.")
    problems: list[Path] = Field(min_length=1)
    samples: Path = Field(description="Shards of a sampling job: the chains. Their problems must be in `problems`.")
    rollouts: int = Field(8, ge=1, description="Completions from the end of each step. Math-Shepherd: 8.")
    sampling: Sampling = Field(description="How they are sampled; max_new_tokens counts new tokens only.")
    held_out_share: float = Field(
        0.15, gt=0, lt=1, description="Share of problems whose chains are only for evaluation."
    )
    shard_chains: int = Field(256, ge=1, description="Chains per shard; a killed job loses at most one shard.")
    scoring: Scoring = Scoring()
    hardware: WholeSequences = Hardware()


class ProcessRewardJob(JobBase):
    """Train a process reward model on labelled steps."""

    kind: Literal["process_reward_model"] = "process_reward_model"
    settings: ProcessRewardModel
    model: str
    data: Path = Field(description="Output of a step_labels job, or parquet with the same columns.")


class RLJob(JobBase):
    """Train a policy by reinforcement learning."""

    kind: Literal["rl"] = "rl"
    settings: RL
    model: str
    problems: list[Path] = Field(min_length=1)
    validation_problems: list[Path] = Field([], description="Problems for validate_every; never trained on.")
    demonstrations: Path | None = Field(
        None, description="Parquet shards with columns prompt and completion: data for method 'sft'."
    )
    pairs: Path | None = Field(
        None, description="Parquet with columns prompt, chosen, rejected: data for method 'dpo' with files."
    )
    template: Template = "chat"
    zero_template: str | None = None
    helpful_model: str | None = None
    safe_model: str | None = None

    @model_validator(mode="after")
    def _something_is_validated(self) -> RLJob:
        if self.settings.validate_every and not self.validation_problems:
            raise ValueError("settings.validate_every needs validation_problems")
        return self

    @model_validator(mode="after")
    def _step_model_is_a_folder(self) -> RLJob:
        if self.settings.reads_step_model:
            raise ValueError(f"settings.step_reward {STEP_MODEL!r} is a stage of recipes; give the model's folder")
        return self


class SampleTask(Settings):
    """Completions of one policy for one list of problems."""

    name: str = Field(pattern=r"^[\w.-]+$")
    model: str
    policy: str = Field(description="Digest of the policy; stored in every sample.")
    problems: list[Path]
    first: dict[Literal["reasoning", "general"], int] | None = Field(
        None, description="Use only the first N problems of each domain; none of a domain not listed. None: all."
    )
    samples_per_problem: int = Field(ge=1)
    general_samples: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="Samples per general prompt. None: samples_per_problem.",
    )
    enough_right: int | None = Field(
        None, ge=1, description="Problems with fewer correct samples are sampled again, up to samples_max. None: once."
    )
    samples_max: int = Field(64, ge=1, description="Maximum samples per problem that is sampled again.")
    sampling: Sampling
    sampling_by_source: dict[str, Sampling] = Field(
        {}, description="Replaces `sampling` for problems of these sources."
    )
    engine: TextEngineSettings | None = Field(None, description="Sampling engine. None: as hardware.sampler says.")
    rewards: list[str] = Field(
        ["accuracy", "format", "language"], description="Rule-based rewards computed for every sample."
    )
    template: Template = "chat"
    zero_template: str | None = None
    helpful_model: str | None = None
    safe_model: str | None = None


class SampleJob(JobBase):
    """Sample and score completions of whole problem sets."""

    kind: Literal["sample"] = "sample"
    tasks: list[SampleTask]
    shard_size: int = Field(512, ge=1, description="Problems per shard; a killed job loses at most one shard.")
    scoring: Scoring = Scoring()
    judge: JudgeSettings | None = Field(
        None, description="Checks answers for verifiers 'judge' and 'rubric', and rubrics of other prompts. None: none."
    )
    hardware: WholeSequences = Hardware()
    ray: RayCluster | None = None

    @model_validator(mode="after")
    def _one_way_to_spread(self) -> SampleJob:
        for task in self.tasks:
            check_shards(task.engine, self.hardware, self.ray)
        return self


class CopyModelJob(JobBase):
    """Copy a pretrained model, after checking that it loads."""

    kind: Literal["copy_model"] = "copy_model"
    model: str
    hardware: WholeSequences = Hardware()


JOBS: dict[str, type[JobBase]] = {
    "pretrain": PretrainJob,
    "sft": SFTJob,
    "reward_model": RewardModelJob,
    "step_labels": StepLabelsJob,
    "process_reward_model": ProcessRewardJob,
    "rl": RLJob,
    "sample": SampleJob,
    "copy_model": CopyModelJob,
}
