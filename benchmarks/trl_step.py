"""TRL's side of benchmarks/grpo_vs_trl.py."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

from grpo_case import ADAM_BETA2, CLIP, LEARNING_RATE, MAX_GRAD_NORM, Case, letters, report, step_record


def trl_arguments(case: Case) -> dict[str, Any]:
    """The same step; everything else as fast as TRL has it on a CPU, and on a GPU with vLLM where it is installed."""
    vllm = case.device == "cuda" and importlib.util.find_spec("vllm") is not None
    return {
        "output_dir": str(Path(case.folder) / "trl"),
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": case.device == "cpu",
        "bf16": case.device == "cuda",
        **(vllm_arguments() if vllm else {}),
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": case.seed,
        "shuffle_dataset": False,
        "max_steps": case.warm_up + case.steps,
        "per_device_train_batch_size": case.trl_rows,
        "gradient_accumulation_steps": case.rows // case.trl_rows,
        "num_generations": case.group_size,
        "max_completion_length": case.max_new_tokens,
        "temperature": 1.0,
        "loss_type": "grpo",
        "beta": case.kl_coef,
        "use_bias_correction_kl": False,
        "epsilon": CLIP,
        "scale_rewards": "group",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta2": ADAM_BETA2,
        "max_grad_norm": MAX_GRAD_NORM,
    }


def vllm_arguments() -> dict[str, Any]:
    """vLLM in TRL's process as in ours: as much of the GPU, and asleep during the update."""
    from grpo.config.engines import VLLM

    share = VLLM(kind="local").gpu_memory_utilization
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": share}
    return vllm | {"vllm_enable_sleep_mode": True}


def make_trl_trainer(case: Case, trainer_class: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    def trl_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [letters(completion[0]["content"]) for completion in completions]

    return trainer_class(
        case.model,
        reward_funcs=trl_reward,
        args=GRPOConfig(**trl_arguments(case)),
        train_dataset=Dataset.from_dict({"prompt": case.prompts}),
    )


def trl(case: Case) -> dict[str, Any]:
    """TRL's own trainer; a step lasts from the end of one to the end of the next."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    parts: dict[str, float] = {}
    tokens: list[int] = []
    prompts: list[int] = []
    steps: list[dict[str, Any]] = []

    def timed(name: str, function: Any, *args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        parts[name] = parts.get(name, 0.0) + time.perf_counter() - began
        return result

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            result = timed("sampling", super()._generate, *args)
            prompts.append(sum(map(len, result[0])) // case.group_size)
            tokens.append(sum(map(len, result[1])))
            return result

        def _calculate_rewards(self, *args: Any) -> Any:
            return timed("rewards", super()._calculate_rewards, *args)

        def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> Any:
            forward = super()._get_per_token_logps_and_entropies
            if model is self.ref_model:
                return timed("reference", forward, model, *args, **options)
            return forward(model, *args, **options)

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **options: Any) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            now = time.perf_counter()
            parts["update"] = now - self.last - sum(parts.values())
            steps.append(step_record(now - self.last, sum(tokens), dict(parts)))
            parts.clear()
            tokens.clear()
            self.last = now

    trainer = make_trl_trainer(case, Timed)
    trainer.add_callback(Clock())
    trainer.train()
    trainer.save_model(str(Path(case.folder) / "trl" / "model"))  # as ours does: it is part of the peak of memory
    return report(case, steps, prompts[0])
