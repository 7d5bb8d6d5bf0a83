"""The settings of docs/engines.md for DeepSeek-V3 on verl's Megatron engine, as far as verl checks them without it."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from grpo.config.jobs import RLJob
from grpo.trainers.verl.overrides import overrides
from grpo.trainers.verl.rl_settings import rl_settings
from tests.support import job_runner
from tests.support.job_runner import RL, ROOT
from tests.support.verl_environment import ON_CPU, PYTHON, needs_verl

pytestmark = [pytest.mark.system, needs_verl]

CHECKED = """
import json, sys
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass, validate_config

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
validate_config(config, use_reference_policy=True, use_critic=False)
actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
reference = config.actor_rollout_ref.ref.megatron
rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
optimizer = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim)
print(json.dumps({
    "kind": type(actor.engine).__name__,
    "actor": [getattr(actor.engine, name) for name in sizes],
    "reference": [reference[name] for name in sizes],
    "recompute": actor.engine.override_transformer_config["recompute_granularity"],
    "last_stage": actor.engine.override_transformer_config["num_layers_in_last_pipeline_stage"],
    "sampler": rollout.tensor_model_parallel_size,
    "optimizer": type(optimizer).__name__,
    "optimizers_own": dict(optimizer.override_optimizer_config),
    "goes_on": optimizer.use_checkpoint_opt_param_scheduler,
    "dropout": [actor.engine.override_transformer_config[name] for name in ("attention_dropout", "hidden_dropout")],
    "context": rollout.max_model_len,
    "devices": config.trainer.nnodes * config.trainer.n_gpus_per_node,
}))
"""


def test_verl_checks_the_configuration_for_deepseek_v3(model_folder, problems, tmp_path):
    page = (ROOT / "docs/engines.md").read_text()
    (block,) = (block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "megatron" in block)
    hardware = tomllib.loads(block)["reasoning_rl"]["hardware"]
    settings = {**RL, "prompts_per_step": 32, "group_size": 16, "reference_refresh_steps": 4, "hardware": hardware}
    places = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    job = RLJob(settings=settings, model=model_folder, problems=[problems], seed=0, **places)
    told = rl_settings(job, tmp_path, Path(model_folder), longest=2048, done=0, end=40)
    command = [PYTHON, "-c", CHECKED, "model_engine=megatron", *overrides(told), *job.settings.hardware.trainer.options]
    environment = job_runner.ENVIRONMENT | ON_CPU
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "kind": "McoreEngineConfig",
        "actor": [8, 12, 8],
        "reference": [8, 12, 8],
        "recompute": "full",
        "last_stage": 6,
        "sampler": 32,
        "optimizer": "McoreOptimizerConfig",
        "optimizers_own": {
            "adam_beta1": 0.9,
            "adam_beta2": job.settings.optimizer.adam_beta2,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        },
        "goes_on": True,
        "dropout": [0.0, 0.0],
        "context": 2048 + RL["sampling"]["max_new_tokens"],
        "devices": 96,
    }
