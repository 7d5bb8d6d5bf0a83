"""This library's settings in verl's words, as far as its SFT and its RL trainer share them."""

from __future__ import annotations

from pathlib import Path

from grpo.config.common import Hardware, Optimizer
from grpo.config.trainers import MegatronSplit, Verl
from grpo.trainers.verl.model_input import without_noise
from grpo.trainers.verl.overrides import Value
from grpo.training.optimizer import learning_rate_share

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
"""Our names of data types -> verl's."""


def model_settings(model: Path, hardware: Hardware) -> dict[str, Value]:
    """Of verl's section `model`, for the model in that folder."""
    # verl packs with flash-attn alone, which computes in 16 bits on a GPU.
    packed = hardware.device != "cpu" and hardware.dtype == "bfloat16" and hardware.attention != "plain"
    return {
        "path": str(model),
        "trust_remote_code": hardware.remote_code,
        "enable_gradient_checkpointing": hardware.gradient_checkpointing,
        "use_remove_padding": packed,
        **({} if packed else {"+override_config.attn_implementation": "sdpa"}),
        **under("+override_config", dict(without_noise(model))),
    }


def engine_settings(verl: Verl, hardware: Hardware, seed: int, weights: str) -> dict[str, Value]:
    """Of a section with the engine of a model whose weights are of the type `weights`."""
    if verl.megatron is not None:
        return _megatron_settings(verl.megatron, hardware, seed)
    arithmetic = PRECISION[hardware.dtype]
    precision: dict[str, Value] = {"param_dtype": arithmetic, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return {
        "strategy": verl.strategy,
        "model_dtype": PRECISION[weights],
        "dtype": hardware.dtype,
        "+mixed_precision": precision,
        "ulysses_sequence_parallel_size": hardware.sequence_parallel,
        "use_torch_compile": hardware.fused and hardware.device != "cpu",
        "seed": seed % 2**32,
    }


def _megatron_settings(split: MegatronSplit, hardware: Hardware, seed: int) -> dict[str, Value]:
    recomputed: dict[str, Value] = {"recompute_granularity": "full", "recompute_method": "uniform"}
    recomputed["recompute_num_layers"] = 1
    dropout: dict[str, Value] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return {
        "tensor_model_parallel_size": split.tensor,
        "pipeline_model_parallel_size": split.pipeline,
        "context_parallel_size": split.context,
        "expert_model_parallel_size": split.expert,
        "expert_tensor_parallel_size": split.expert_tensor,
        "param_offload": split.offload,
        "optimizer_offload": split.offload,
        "dtype": hardware.dtype,
        "seed": seed % 2**32,
        **(under("override_transformer_config", recomputed) if hardware.gradient_checkpointing else {}),
        **under("++override_transformer_config", dropout),
    }


def optimizer_settings(verl: Verl, optimizer: Optimizer) -> dict[str, Value]:
    """Of verl's section `optim`."""
    betas = [0.9, optimizer.adam_beta2]
    common: dict[str, Value] = {
        "lr": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.max_grad_norm,
        "lr_warmup_steps": optimizer.warmup_steps,
    }
    if verl.megatron is not None:
        return {
            **common,
            # verl does not hand `betas` on to Megatron.
            **{f"+override_optimizer_config.adam_beta{number}": beta for number, beta in enumerate(betas, 1)},
            "lr_decay_style": "cosine",
            "min_lr": optimizer.learning_rate * optimizer.final_learning_rate_share,
            "lr_warmup_init": optimizer.learning_rate / optimizer.warmup_steps if optimizer.warmup_steps else 0.0,
            "use_checkpoint_opt_param_scheduler": True,  # a resumed run goes on with the rates, too
        }
    return {
        **common,
        "betas": [*betas],
        "lr_scheduler_type": "cosine",
        "min_lr_ratio": optimizer.final_learning_rate_share,
        # Counted from 0, verl's first step of a warm-up has a rate of zero. Counted from 1, its decay is a step ahead.
        "zero_indexed_step": optimizer.warmup_steps == 0,
    }


def tokens_per_device(hardware: Hardware, micro_batch_tokens: int, longest: int) -> int:
    """Tokens of a micro-batch as verl counts them: it multiplies by the number of processes that share each sequence.
    `longest`: tokens of the longest sequence."""
    split = hardware.trainer.megatron if hardware.trainer else None
    sharing = split.context if split else hardware.sequence_parallel
    return -(-max(micro_batch_tokens, longest) // sharing)


def saved_dtype(hardware: Hardware) -> str:
    """Type of the weights in the model that verl writes."""
    assert hardware.trainer is not None
    return "bfloat16" if hardware.trainer.megatron else hardware.to_train().dtype


def rate_share(step: int, steps: int, optimizer: Optimizer) -> float:
    """Share of the peak learning rate that verl takes at step `step`, counted from 0, with these settings."""
    ahead = optimizer.warmup_steps > 0 and step >= optimizer.warmup_steps
    return learning_rate_share(step + ahead, steps, optimizer)


def trainer_settings(hardware: Hardware) -> dict[str, Value]:
    """Of verl's section `trainer`."""
    return {
        "device": hardware.device if hardware.device != "auto" else "cuda",
        "n_gpus_per_node": hardware.processes,
        "nnodes": hardware.nodes,
        "resume_mode": "auto",
        "total_epochs": 1,  # of data that have the batches of all epochs
        "logger": ["file"],
    }


def under(section: str, settings: dict[str, Value]) -> dict[str, Value]:
    """The settings of a section, with its name before theirs, behind + and ++. A section that begins with + adds them
    all."""
    bare = {name: name.lstrip("+") for name in settings}
    return {f"{name.removesuffix(bare[name])}{section}.{bare[name]}": value for name, value in settings.items()}
