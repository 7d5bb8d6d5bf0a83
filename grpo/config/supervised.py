"""Settings of pretraining, SFT and reward models.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version). If the paper does not give a value, the description says
"unpublished".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from grpo.config.common import Hardware, Lora, Optimizer, WholeSequences
from grpo.config.trainers import check_even_shares, check_translated
from grpo.config.validation import HeldOutValidation, Keep, ValidateEvery
from grpo.settings import Settings


class Supervised(Settings):
    """Common settings of pretraining, SFT and reward models."""

    batch_size: int = Field(128, ge=1, description="Sequences per step. R1 SFT: 128; distillation: 64.")
    micro_batch_tokens: int = Field(
        16384,
        ge=64,
        description="Tokens per forward and backward pass, packed without padding; bounds memory.",
    )
    optimizer: Optimizer
    hardware: WholeSequences = Hardware()
    save_every: int = Field(
        200,
        ge=1,
        description="Steps between checkpoints that a killed job resumes from. After ten minutes one is due anyway, "
        "except with verl.",
    )

    @model_validator(mode="after")
    def _weights_move(self) -> Supervised:
        if getattr(self, "lora", None) is None:  # adapters are float32
            self.hardware.check_learning_rate(self.optimizer.learning_rate)
        return self

    @model_validator(mode="after")
    def _matrices_are_whole(self) -> Supervised:
        if self.optimizer.kind == "muon" and self.hardware.processes * self.hardware.nodes > 1:
            raise ValueError(
                "optimizer.kind 'muon' needs whole matrices; set hardware.processes and hardware.nodes to 1, or take "
                "'adamw'"
            )
        return self


class Pretrain(Supervised):
    """A small Llama-style base model with its own tokenizer, for recipes that start from nothing."""

    vocabulary: int = Field(384, ge=300, description="Entries of the byte-level BPE tokenizer trained on the corpus.")
    hidden: int = Field(128, ge=16, description="Width of the residual stream.")
    feed_forward: int = Field(512, ge=16, description="Width inside the feed-forward blocks.")
    layers: int = Field(4, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads.")
    context: int = Field(256, ge=16, description="Maximum sequence length, tokens; documents are packed to half of it.")
    batch_size: int = Field(64, ge=1, description="Text blocks per step.")
    steps: int = Field(ge=1, description="Optimizer steps.")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Pretrain:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        return self


class Tuning(Supervised):
    """Common settings of SFT and reward models: training of a pretrained model."""

    epochs: int = Field(2, ge=1, description="Passes over the data. R1: 2-3.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many steps. None: all epochs.")
    max_tokens: int = Field(32768, ge=16, description="Longer sequences are dropped and counted. R1: 32,768.")


class SFT(Tuning):
    """Supervised fine-tuning."""

    lora: Lora | None = Field(None, description="Train low-rank adapters instead of all weights. None: all weights.")
    hardware: Hardware = Hardware()
    validate_every: ValidateEvery = None
    validation: HeldOutValidation = Field(HeldOutValidation(), exclude_if=lambda value: value == HeldOutValidation())
    keep: Keep = "last"

    @model_validator(mode="after")
    def _validation_fits(self) -> SFT:
        self.validation.check_chosen(self.validate_every, self.keep)
        return self

    @model_validator(mode="after")
    def _layers_can_be_divided(self) -> SFT:
        self.hardware.check_adapters(self.lora)
        self.hardware.check_optimizer(self.optimizer.kind)
        return self

    @model_validator(mode="after")
    def _verl_knows_them(self) -> SFT:
        hardware = self.hardware
        if hardware.trainer is None:
            return self
        check_translated(
            {
                "lora": self.lora is not None,
                "validate_every": self.validate_every is not None,
                "optimizer.kind": self.optimizer.kind != "adamw",
            }
        )
        check_even_shares("batch_size", self.batch_size, hardware.copies)
        return self


def _no_adapters(value: Any) -> None:
    if value is not None:
        raise ValueError("reward models train all weights, adapters are for SFT and RL; remove it")


class ScalarHead(Tuning):
    """Common settings of reward models, all of whose weights are trained."""

    # Part of every record, because it was a setting once: without it, all keys would change.
    lora: Annotated[SkipJsonSchema[None], BeforeValidator(_no_adapters)] = Field(None, description="None: all weights.")


class ProcessRewardModel(ScalarHead):
    """Same loop as SFT with a scalar head at each step's end (Math-Shepherd, arXiv 2312.08935)."""

    label: Literal["hard", "soft"] = Field(
        "hard",
        description="Target of a step: 1 if any rollout from it was correct (hard), or the share that were (soft). "
        "Math-Shepherd: hard; soft is nearly the same.",
    )


class RewardModel(ScalarHead):
    """Same loop as SFT with a scalar head. R1 v2: batch 256, lr 6e-6, 1 epoch, 8,192 tokens."""

    batch_size: int = Field(
        128,
        ge=1,
        description="Batch elements per step. Pairs: prompts, each with all its pairs (InstructGPT 3.5). Labels: "
        "responses. R1: 256 [I: pairs].",
    )
    margin: float = Field(
        0.0,
        ge=0,
        description="Pairs only: margin per unit of the verdict's strength, -log sigma(r_w - r_l - margin * strength) "
        "(Llama 2, eq. 2). A judge's strength is its mean difference, at most 2. R1: unpublished.",
    )
    centring: float = Field(
        0.0,
        ge=0,
        description="Pairs only: weight of (r_w + r_l)^2, which keeps scores around 0 (arXiv 2312.09244; TRL's "
        "center_rewards_coefficient, which suggests 0.01). R1: unpublished.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        description="Number of models to train, each with its own seed and bootstrap sample of the prompts; scores are "
        "their mean, and RL's uncertainty_penalty multiplies their spread. 1: one model, all prompts.",
    )
