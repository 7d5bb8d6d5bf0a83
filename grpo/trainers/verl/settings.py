"""This library's settings in verl's words, as far as its SFT and its RL trainer share them."""

from __future__ import annotations

from grpo.config.common import Hardware, Optimizer
from grpo.config.trainers import MegatronSplit, Verl
from grpo.trainers.verl.overrides import Value
from grpo.training.optimizer import learning_rate_share

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
"""Our names of data types -> verl's."""


def model_settings(model: str, hardware: Hardware) -> dict[str, Value]:
    """Of verl's section `model`."""
    packed = hardware.device != "cpu" and hardware.attention != "plain"  # verl packs with flash-attn alone
    return {
        "path": model,
        "trust_remote_code": hardware.remote_code,
        "enable_gradient_checkpointing": hardware.gradient_checkpointing,
        "use_remove_padding": packed,
        **({} if packed else {"+override_config.attn_implementation": "sdpa"}),
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
    }


def optimizer_settings(verl: Verl, optimizer: Optimizer) -> dict[str, Value]:
    """Of verl's section `optim`."""
    common: dict[str, Value] = {
        "lr": optimizer.learning_rate,
        "betas": [0.9, optimizer.adam_beta2],
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.max_grad_norm,
        "lr_warmup_steps": optimizer.warmup_steps,
    }
    if verl.megatron is not None:
        last = optimizer.learning_rate * optimizer.final_learning_rate_share
        return {**common, "lr_decay_style": "cosine", "min_lr": last}
    return {
        **common,
        "lr_scheduler_type": "cosine",
        "min_lr_ratio": optimizer.final_learning_rate_share,
        # Counted from 0, verl's first step of a warm-up has a rate of zero. Counted from 1, its decay is a step ahead.
        "zero_indexed_step": optimizer.warmup_steps == 0,
    }


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
    """The settings of a section, with its name before theirs."""
    return {
        f"+{section}.{name[1:]}" if name.startswith("+") else f"{section}.{name}": value
        for name, value in settings.items()
    }
