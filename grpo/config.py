"""Typed settings of every job. Each field gives meaning, unit, range and source.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version), DSM = DeepSeekMath, arXiv 2402.03300.
Where the paper is silent the description says "unpublished".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Unknown keys are refused, so that a typo never silently trains with a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sampling(Settings):
    temperature: float = Field(1.0, gt=0, le=5, description="Softmax temperature. R1: 1.0 in RL, 0.6 in evaluation.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass kept. R1: 0.95 in evaluation, 1.0 in RL [I].")
    max_new_tokens: int = Field(ge=1, description="Longest completion, tokens. R1: 32,768 (65,536 late in R1-Zero).")
    batch_size: int = Field(256, ge=1, description="Sequences sampled side by side on one device; bounds memory only.")


class Optimizer(Settings):
    learning_rate: float = Field(gt=0, lt=1, description="Peak learning rate. R1: 5e-5 for SFT, 3e-6 for RL.")
    final_learning_rate_share: float = Field(
        1.0, ge=0, le=1, description="Cosine decay ends at this share of the peak. R1 SFT: 0.1; RL: 1.0 (constant) [I]."
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, optimizer steps. Unpublished.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay. Unpublished.")
    adam_beta2: float = Field(0.95, gt=0, lt=1, description="AdamW second-moment decay. Unpublished.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm. Unpublished.")


class Hardware(Settings):
    """Where and how a job computes."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="'auto' takes a GPU where there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the weights and the arithmetic. float32 on a CPU, bfloat16 on recent GPUs."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations backwards: less memory, more time.")


class Pretrain(Settings):
    """A small Llama-style base model with its own tokenizer, for recipes that start from nothing."""

    vocabulary: int = Field(384, ge=300, description="Entries of the byte-level BPE tokenizer trained on the corpus.")
    hidden: int = Field(128, ge=16, description="Width of the residual stream.")
    feed_forward: int = Field(512, ge=16, description="Width inside the feed-forward blocks.")
    layers: int = Field(4, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads.")
    context: int = Field(256, ge=16, description="Longest sequence, tokens; documents are packed into half of it.")
    batch_size: int = Field(64, ge=1, description="Packed sequences a step.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    save_every: int = Field(200, ge=1, description="Steps between checkpoints that a killed job continues from.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Pretrain:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class SFT(Settings):
    epochs: int = Field(2, ge=1, description="Passes over the data. R1: 2-3.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many steps; none: all epochs.")
    batch_size: int = Field(128, ge=1, description="Sequences a step. R1: 128; distillation: 64.")
    micro_batch_size: int = Field(16, ge=1, description="Sequences in memory at once; the rest is accumulated.")
    max_tokens: int = Field(32768, ge=16, description="Longer sequences are dropped and counted. R1: 32,768.")
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    save_every: int = Field(200, ge=1, description="Steps between checkpoints that a killed job continues from.")

    @model_validator(mode="after")
    def _micro_batches_fill_the_batch(self) -> SFT:
        if self.batch_size % min(self.micro_batch_size, self.batch_size):
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of micro_batch_size ({self.micro_batch_size})"
            )
        return self


class RewardModel(SFT):
    """Same loop as SFT with a scalar head. R1 v2: batch 256, lr 6e-6, 1 epoch, 8,192 tokens."""


class RewardWeights(Settings):
    """Reward of a completion = weighted sum. R1 sums accuracy, format and language consistency directly."""

    accuracy: float = Field(1.0, ge=0, description="Weight of the verifier's verdict, 0..1 (reasoning problems).")
    format: float = Field(1.0, ge=0, description="Weight of the think/answer format, 0 or 1. R1: equal to accuracy.")
    language: float = Field(0.0, ge=0, description="Weight of the share of target-language words in the reasoning.")
    helpful: float = Field(0.0, ge=0, description="Weight of the helpful reward model (general prompts). Unpublished.")
    safe: float = Field(0.0, ge=0, description="Weight of the safety reward model (general prompts). Unpublished.")


class GRPO(Settings):
    """Group Relative Policy Optimization: DSM eq. 3 with the schedule of R1.

    A step is one optimizer update on `prompts_per_step * group_size` completions; a rollout samples for
    `minibatches` steps at once, so that the last of them learns from samples that are `minibatches - 1` updates old.
    """

    steps: int = Field(
        ge=1, description="Optimizer updates. R1-Zero: 10,400; alignment: 1,700; reasoning: unpublished."
    )
    prompts_per_step: int = Field(32, ge=1, description="Problems a step. R1: 32.")
    group_size: int = Field(16, ge=2, description="Completions a problem (G). R1: 16.")
    minibatches: int = Field(1, ge=1, description="Steps that share one rollout. R1: 16 (8,192 outputs, 512 a step).")
    clip_eps_low: float = Field(0.2, gt=0, description="Ratio is clipped below at 1 - this. R1: 10, never binding.")
    clip_eps_high: float = Field(0.2, gt=0, description="Ratio is clipped above at 1 + this. R1: 10.")
    kl_coef: float = Field(0.001, ge=0, description="Weight of the k3 penalty to the reference. R1: 0.001.")
    reference_refresh_steps: int | None = Field(
        400, ge=1, description="The reference becomes a copy of the policy every so many steps. R1: 400. None: never."
    )
    sampling: Sampling
    rewards: RewardWeights = RewardWeights()
    micro_batch_tokens: int = Field(16384, ge=64, description="Padded tokens in one forward and backward pass.")
    general_last_steps: int = Field(
        0,
        ge=0,
        description="General prompts and preference rewards only in this many last steps. R1: 400 of 1,700, "
        "because longer training on them led to reward hacking.",
    )
    general_share: float = Field(0.0, ge=0, le=1, description="Share of general prompts in those steps. Unpublished.")
    optimizer: Optimizer
    hardware: Hardware = Hardware()
    save_every: int = Field(20, ge=1, description="Steps between checkpoints that a killed job continues from.")
    samples_every: int = Field(20, ge=1, description="Steps between the completions kept for reading.")

    @model_validator(mode="after")
    def _general_fits(self) -> GRPO:
        if self.general_last_steps > self.steps:
            raise ValueError(f"general_last_steps ({self.general_last_steps}) exceeds steps ({self.steps})")
        if self.general_last_steps and not self.general_share:
            raise ValueError("general_last_steps is set, so general_share must be above 0")
        return self


Template = Literal["chat", "r1_zero"]

ZERO_TEMPLATE = (
    "Below, a User asks and an Assistant solves. The Assistant first works the problem out between <think> and "
    "</think>, then gives only the result between <answer> and </answer>.\n"
    "User: {prompt}\nAssistant:"
)
"""The plain-text template for a base model, which knows no chat tokens (R1, table 1)."""


class JobBase(Settings):
    """What every job has. Paths are local; `out` becomes the artifact, `state` is for resuming only."""

    out: Path
    state: Path
    metrics: Path
    result: Path
    seed: int = Field(ge=0)


class PretrainJob(JobBase):
    kind: Literal["pretrain"] = "pretrain"
    settings: Pretrain
    corpus: Path = Field(description="A text file, documents separated by blank lines.")


class SFTJob(JobBase):
    kind: Literal["sft"] = "sft"
    settings: SFT
    model: str
    data: Path = Field(description="Parquet shards with columns messages and completion.")


class RewardModelJob(JobBase):
    kind: Literal["reward_model"] = "reward_model"
    settings: RewardModel
    model: str
    data: Path = Field(description="Parquet: messages, chosen, rejected (pairs) or messages, response, label (points).")
    loss: Literal["pairs", "points"]


class GRPOJob(JobBase):
    kind: Literal["grpo"] = "grpo"
    settings: GRPO
    model: str
    problems: list[Path] = Field(min_length=1)
    template: Template = "chat"
    zero_template: str | None = None
    helpful_model: str | None = None
    safe_model: str | None = None


class SampleTask(Settings):
    """Completions of one policy for one list of problems."""

    name: str = Field(pattern=r"^[\w.-]+$")
    model: str
    policy: str = Field(description="Digest of the policy; part of every sample.")
    problems: list[Path]
    first: dict[Literal["reasoning", "general"], int] | None = Field(
        None, description="Only so many problems of each domain, in their order; none of a domain not named. None: all."
    )
    samples_per_problem: int = Field(ge=1)
    sampling: Sampling
    template: Template = "chat"
    zero_template: str | None = None
    helpful_model: str | None = None
    safe_model: str | None = None


class SampleJob(JobBase):
    kind: Literal["sample"] = "sample"
    tasks: list[SampleTask]
    shard_size: int = Field(512, ge=1, description="Problems a shard; a killed job loses at most one shard.")
    hardware: Hardware = Hardware()


class CopyModelJob(JobBase):
    """Take a pretrained model over, after checking that it loads."""

    kind: Literal["copy_model"] = "copy_model"
    model: str
    hardware: Hardware = Hardware()


JOBS: dict[str, type[JobBase]] = {
    "pretrain": PretrainJob,
    "sft": SFTJob,
    "reward_model": RewardModelJob,
    "grpo": GRPOJob,
    "sample": SampleJob,
    "copy_model": CopyModelJob,
}
