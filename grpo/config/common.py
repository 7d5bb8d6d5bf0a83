"""Settings that several kinds of job share. Each field's description gives meaning, unit, range and source.

Sources: R1 = arXiv 2501.12948 (v2: the Nature version), DSM = DeepSeekMath, arXiv 2402.03300. If the paper does not
give a value, the description says "unpublished".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from grpo.config.trainers import Verl
from grpo.settings import Settings

USUAL_WEIGHT = 0.02
"""Initial standard deviation of linear layers and embeddings (`initializer_range` of GPT-2, Llama, Qwen and DeepSeek),
and the approximate size of most weights of a trained model."""
BFLOAT16_RESOLUTION = 2**-8
"""A bfloat16 number has 8 significant bits. An update smaller than half of a weight's last digit (2^-9 to 2^-8 of the
weight) is lost to rounding."""
SMALLEST_BFLOAT16_RATE = USUAL_WEIGHT * BFLOAT16_RESOLUTION
"""Smallest AdamW learning rate whose updates bfloat16 weights can represent: 7.8e-5. One AdamW step moves a weight by
at most about the learning rate."""


class Sampling(Settings):
    """How completions are drawn from a policy."""

    temperature: float = Field(1.0, gt=0, le=5, description="Softmax temperature. R1: 1.0 in RL, 0.6 in evaluation.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling mass. R1: 0.95 in evaluation, 1.0 in RL [I].")
    max_new_tokens: int = Field(
        ge=1, description="Maximum completion length, tokens. R1: 32,768 (65,536 late in R1-Zero)."
    )
    batch_size: int = Field(256, ge=1, description="Sequences sampled in parallel per device; only bounds memory.")


class Optimizer(Settings):
    """The optimizer and its learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="adamw_8bit: each moment takes one byte per weight, instead of the weights' dtype; needs "
        "bitsandbytes, on a CPU or a CUDA GPU. TRL's optim='adamw_8bit'. muon: Muon for the matrices of hidden layers, "
        "AdamW for other weights; fewer steps from a random start. One process, not for RL.",
    )
    learning_rate: float = Field(gt=0, lt=1, description="Peak learning rate. R1: 5e-5 for SFT, 3e-6 for RL.")
    final_learning_rate_share: float = Field(
        1.0, ge=0, le=1, description="Cosine decay ends at this share of the peak. R1 SFT: 0.1; RL: 1.0 (constant) [I]."
    )
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up, optimizer steps. Unpublished.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay. Unpublished.")
    adam_beta2: float = Field(0.95, gt=0, lt=1, description="AdamW second-moment decay. Unpublished.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping by global norm. Unpublished.")


class Hardware(Settings):
    """Where and how a job computes.

    `device`, `fused`, `attention`, `sampler`, `processes` and `nodes` are not part of a stage's key: they only change
    the order of sums and, for `sampler`, the random numbers, and an artifact made with one choice is reused under
    another.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="'auto' uses a GPU if there is one.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of weights and arithmetic. float32 on a CPU, bfloat16 on recent GPUs."
    )
    mixed_precision: bool = Field(
        False,
        description="Keep trained weights, their gradients, the optimizer's moments and the saved model in float32; "
        "arithmetic, sampling and reference models stay in `dtype`, which must be bfloat16 (TRL's bf16=True). Without "
        "it, bfloat16 weights lose updates below about 1/500 of their size, so peak learning rates below 7.8e-5 are "
        "refused. Costs 2 more bytes per weight, gradient and moment.",
    )
    fused: bool = Field(
        True,
        exclude_if=bool,  # true is omitted from records, so that they equal those of earlier versions
        description="false: train and sample with transformers' own modules and PyTorch's own operations, on any "
        "device, without the fused blocks and CPU kernels. Slower, equal up to rounding; for checking whether a bug "
        "is in a kernel.",
    )
    attention: Literal["auto", "packed", "plain"] = Field(
        "auto",
        exclude_if=lambda value: value == "auto",
        description="packed: sequences concatenated without padding, a group's prompt computed once. plain: "
        "transformers' own forward pass and `generate` on sequences of equal length; correct for every model it can "
        "run, but slower. auto: packed if a few short sequences get the same log-probabilities both ways when the "
        "model is loaded, else plain.",
    )
    sampler: Literal["auto", "own", "continuous", "vllm"] = Field(
        "auto",
        exclude_if=lambda value: value == "auto",
        description="What samples if no `engine` is set. own: this library's sampler, whose completions depend only "
        "on their seeds. continuous: transformers' continuous batching. vllm: vLLM in the trainer's process. auto: "
        "vllm on a GPU where it is installed and can run the job, else own. "
        "Truncated importance sampling corrects for samplers other than own.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in backward: less memory, more time."
    )
    remote_code: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="Whether model folders that a job loads may include their own modules (auto_map in their "
        "configuration), which run with your permissions. Tokenizers' own code is never run.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Processes on each machine, one per GPU (torchrun). Weights, gradients, optimizer state (FSDP2) "
        "and rollouts are split among them. Updates equal those of one process, up to rounding.",
    )
    nodes: int = Field(
        1,
        ge=1,
        description="Machines, each with `processes` processes and all sharing one home folder. Run the same command "
        "on each: PET_RDZV_ENDPOINT=HOST:PORT of the first, PET_NODE_RANK=0, 1, ...",
    )

    sequence_parallel: int = Field(
        1,
        ge=1,
        exclude_if=lambda value: value == 1,
        description="Neighbouring processes that share the tokens of each sequence they train on (Ulysses, arXiv "
        "2309.14509), for sequences whose activations one GPU cannot hold. Divides processes * nodes and the model's "
        "number of attention heads. RL and SFT of packed models.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        exclude_if=lambda value: value == 1,
        description="Neighbouring processes that divide attention, MLPs and experts among themselves (tensor and "
        "expert parallelism, Megatron), for layers that one GPU cannot gather. They share tokens as well, as with "
        "sequence_parallel, which must then be 1. Divides processes * nodes, the model's number of attention heads "
        "and its number of key heads. RL, except PPO, and SFT of packed models, without adapters or adamw_8bit.",
    )
    trainer: Verl | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="An engine of another project that trains in the place of this library. SFT and RL only. "
        "None: this library.",
    )

    @model_validator(mode="after")
    def _sequences_are_shared_evenly(self) -> Hardware:
        for name, size in (("sequence_parallel", self.sequence_parallel), ("tensor_parallel", self.tensor_parallel)):
            if self.processes * self.nodes % size:
                raise ValueError(f"{name} ({size}) must divide processes * nodes ({self.processes * self.nodes})")
        if self.sequence_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel shares tokens among the same processes; leave sequence_parallel out")
        if self.tensor_parallel > 1 and self.trainer is not None:
            raise ValueError("tensor_parallel is this library's; with a trainer, set trainer.megatron.tensor instead")
        return self

    @property
    def sharing(self) -> int:
        """Processes that share the tokens of each sequence."""
        return max(self.sequence_parallel, self.tensor_parallel)

    @model_validator(mode="after")
    def _mixed_is_mixed(self) -> Hardware:
        if self.mixed_precision and self.dtype == "float32":
            raise ValueError("mixed_precision is bfloat16 arithmetic on float32 weights; set dtype to 'bfloat16' too")
        return self

    @model_validator(mode="after")
    def _megatron_fits(self) -> Hardware:
        split = self.trainer.megatron if self.trainer else None
        if split is None:
            return self
        if self.processes * self.nodes % split.of_a_copy:
            raise ValueError(
                f"trainer.megatron: tensor * pipeline * context ({split.of_a_copy}) must divide processes * nodes "
                f"({self.processes * self.nodes})"
            )
        if self.sequence_parallel > 1:
            raise ValueError("sequence_parallel is FSDP2's; set trainer.megatron.context instead")
        if not self.mixed_precision:
            raise ValueError("Megatron trains bfloat16 weights with float32 copies: set dtype and mixed_precision")
        return self

    @property
    def copies(self) -> int:
        """Groups of processes, each with other sequences: the model's copies, as far as sequences are concerned."""
        split = self.trainer.megatron if self.trainer else None
        return self.processes * self.nodes // (split.of_a_copy if split else self.sharing)

    def to_train(self) -> Hardware:
        """The same settings with the dtype of trained weights."""
        return self.model_copy(update={"dtype": "float32", "mixed_precision": False}) if self.mixed_precision else self

    def check_adapters(self, lora: Lora | None) -> None:
        """Raises ValueError if adapters cannot be trained on this hardware."""
        if lora is not None and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel divides no layers with adapters; set it to 1, or take sequence_parallel")

    def check_optimizer(self, kind: str) -> None:
        """Raises ValueError if this optimizer cannot train on this hardware."""
        if kind == "adamw_8bit" and self.tensor_parallel > 1:
            raise ValueError(
                "optimizer.kind 'adamw_8bit' stores whole rows in blocks, and tensor_parallel divides rows; take "
                "'adamw', or sequence_parallel"
            )

    def check_learning_rate(self, rate: float) -> None:
        """Raises ValueError if trained weights of this dtype cannot represent updates at this peak learning rate."""
        if self.to_train().dtype == "bfloat16" and rate < SMALLEST_BFLOAT16_RATE:
            raise ValueError(
                f"a learning rate of {rate:g} hardly moves bfloat16 weights: an update below "
                f"1/{1 / BFLOAT16_RESOLUTION:g} of a weight is rounded away, and weights are about {USUAL_WEIGHT:g}; "
                f"set hardware.mixed_precision = true, or a rate of {SMALLEST_BFLOAT16_RATE:.2g} or more, or train "
                "adapters (lora)"
            )


def _check_own_trainer(hardware: Hardware) -> Hardware:
    if hardware.trainer is not None:
        raise ValueError(f"trainer: {hardware.trainer.kind} runs SFT and RL only; leave it out here")
    return hardware


def _check_whole_sequences(hardware: Hardware) -> Hardware:
    for name in ("sequence_parallel", "tensor_parallel"):
        if getattr(hardware, name) > 1:
            raise ValueError(f"{name} is for RL and SFT; set it to 1 here")
    return hardware


OwnTrainer = Annotated[Hardware, AfterValidator(_check_own_trainer)]
"""Hardware of jobs that no other project's trainer can run."""
WholeSequences = Annotated[OwnTrainer, AfterValidator(_check_whole_sequences)]
"""The same, for jobs whose processes cannot share the tokens of a sequence."""


class RayCluster(Settings):
    """Shards on a Ray cluster by Ray Data. Not part of a stage's key: the samples are the same."""

    address: str | None = Field(
        "auto",
        description="Cluster address, as for ray.init. auto: the cluster this machine belongs to. None: one on this "
        "machine for this job only.",
    )
    workers: int = Field(1, ge=1, description="Actors, each with its own engine.")
    gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs per actor. None: as many as its engine runs on: the devices of a local vLLM, none if the "
        "engine is elsewhere or hardware.device is cpu, else 1.",
    )
    cpus: float = Field(1.0, gt=0, description="CPU cores per actor; its rewards run in `scoring.workers` processes.")


class Lora(Settings):
    """Low-rank adapters (arXiv 2106.09685) by peft. The base stays frozen and serves as the reference where one is
    needed."""

    rank: int = Field(16, ge=1, description="Rank of the update of each weight matrix.")
    alpha: int = Field(32, gt=0, description="The update is scaled by alpha / rank.")
    target_modules: str | list[str] = Field(
        "all-linear",
        description="Names of the modules that get an adapter; 'all-linear': all linear layers but the head.",
    )
