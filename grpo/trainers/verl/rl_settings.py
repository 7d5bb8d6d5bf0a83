"""The settings of RL in verl's words."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.algorithms.objectives import OBJECTIVES, Mean, constant_mean, sequence_mean, token_mean
from grpo.config.jobs import RLJob
from grpo.config.rl_by_verl import updates_per_rollout
from grpo.processes.metrics_log import replace_text
from grpo.rl.method_table import reads_reference
from grpo.trainers.verl.checkpoints import CONTENTS, KEPT
from grpo.trainers.verl.overrides import Value
from grpo.trainers.verl.plugins import prompts
from grpo.trainers.verl.protocol import AGENT_LOOP, advantage_name, objective_name
from grpo.trainers.verl.settings import (
    engine_settings,
    model_settings,
    optimizer_settings,
    tokens_per_device,
    trainer_settings,
    under,
)

CHECKPOINTS, PROMPTS, REWARDS = "checkpoints", "prompts.parquet", "rewards.json"
"""In the folder: verl's checkpoints, the prompts, and the address of the reward server."""
_MEANS: dict[Mean, str] = {
    sequence_mean: "seq-mean-token-mean",
    token_mean: "token-mean",
    constant_mean: "seq-mean-token-sum-norm",
}
"""Means of objectives -> verl's names, for its KL penalty."""


def rl_settings(job: RLJob, folder: Path, reference: Path, longest: int, done: int, end: int) -> dict[str, Value]:
    """verl's settings for the optimizer steps from `done` to `end`, with a reference in that folder. `longest`: tokens
    of the longest prompt. `folder`: of what verl reads and writes. Writes the configuration of the agent loop there."""
    settings, hardware = job.settings, job.settings.hardware
    verl, updates, seed = hardware.trainer, updates_per_rollout(settings), job.seed % 2**32
    assert verl is not None
    tokens = settings.max_new_tokens(done)
    loop = folder / "agent_loop.yaml"
    turn = {"name": AGENT_LOOP, "_target_": "grpo.trainers.verl.plugins.turn.Turn", "server": str(folder / REWARDS)}
    replace_text(loop, json.dumps([turn]))
    forward = hardware.model_copy(update={"gradient_checkpointing": False})  # the reference has no backward pass
    engine = "megatron" if verl.megatron else "fsdp_config"
    form = OBJECTIVES[settings.objective]
    actor: dict[str, Value] = {
        **under("optim", optimizer_settings(verl, settings.optimizer)),
        **under(engine, engine_settings(verl, hardware, job.seed, hardware.to_train().dtype)),
        "strategy": verl.strategy,
        "ppo_mini_batch_size": settings.prompts_per_step,
        "ppo_epochs": settings.inner_epochs,
        "shuffle": updates > 1,
        "data_loader_seed": seed,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": tokens_per_device(hardware, settings.micro_batch_tokens, longest + tokens),
        "clip_ratio_low": settings.clip_eps_low,
        "clip_ratio_high": settings.clip_eps_high,
        "policy_loss.loss_mode": objective_name(settings.objective),
        "loss_agg_mode": _MEANS[form.mean],
        "loss_scale_factor": tokens if form.mean is constant_mean else None,
        "use_kl_loss": reads_reference(settings),
        "kl_loss_coef": settings.kl_coef,
        "kl_loss_type": settings.kl_estimator,
        "checkpoint.save_contents": [*CONTENTS],
    }
    rollout: dict[str, Value] = {
        "name": "vllm",
        "n": settings.group_size,
        "temperature": settings.sampling.temperature,
        "max_model_len": longest + tokens,
        "dtype": hardware.dtype,
        "seed": seed,
        "tensor_model_parallel_size": 1,
        "agent.default_agent_loop": AGENT_LOOP,
        "agent.agent_loop_config_path": str(loop),
    }
    if not verl.megatron:
        actor |= {
            "ulysses_sequence_parallel_size": hardware.sequence_parallel,
            "use_torch_compile": hardware.fused and hardware.device != "cpu",
        }
    return {
        **under("actor_rollout_ref.model", model_settings(reference, hardware)),
        **under("actor_rollout_ref.actor", actor),
        **under(f"actor_rollout_ref.ref.{engine}", engine_settings(verl, forward, job.seed, hardware.dtype)),
        **under("actor_rollout_ref.rollout", rollout),
        "algorithm.adv_estimator": advantage_name(settings.advantage, settings.std),
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": settings.sampler_ratio_max,
        "data.train_files": str(folder / PROMPTS),
        "data.val_files": str(folder / PROMPTS),
        "data.custom_cls.path": prompts.__file__,
        "data.custom_cls.name": prompts.Prompts.__name__,
        "data.train_batch_size": settings.prompts_per_step * settings.minibatches,
        "data.max_prompt_length": longest,
        "data.max_response_length": tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,
        **under("trainer", trainer_settings(hardware)),
        "trainer.default_local_dir": str(folder / CHECKPOINTS),
        "trainer.max_actor_ckpt_to_keep": KEPT,
        "trainer.save_freq": -(-settings.save_every // updates),
        "trainer.total_training_steps": end // updates,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": str(folder / "hydra"),
    }
