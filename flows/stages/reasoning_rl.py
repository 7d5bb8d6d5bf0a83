"""Reasoning RL, Dev1 -> Dev2: GRPO with rule rewards (R1, stage 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.stage_contract.checkpoint_outcome import checkpoint_outcome
from flows.stage_contract.stage import Context, Outcome, Stage
from flows.stages.cold_start_data import EXAMPLES
from flows.stages.problems import TRAIN, VALIDATION, unevaluated
from flows.stages.process_reward_model import MODEL
from grpo.config.rl import RL, STEP_MODEL
from grpo.errors import InputError
from tasks.judges.prompt_digests import VERIFYING_DIGESTS
from tasks.preferences.files import PreferenceFile, load_preferences
from tasks.preferences.rows import drop_duplicates, write_preferences
from tasks.trainer.user_code import code_digests, is_folder


def build(context: Context) -> Outcome:
    """Makes Dev2 by training Dev1 with reinforcement learning and rule rewards."""
    demonstrations = context.path("cold_start_data") / EXAMPLES
    return train(context, policy="cold_start_sft", model="dev2", demonstrations=demonstrations)


def train(context: Context, policy: str, model: str, **job: Any) -> Outcome:
    """GRPO from the input `policy` on the training problems. The checkpoint is named `model`."""
    settings = context.config
    if settings.reads_step_model:
        settings = settings.model_copy(update={"step_reward": str(context.path(STEP_MODEL) / MODEL)})
    if settings.validate_every:
        job["validation_problems"] = [_validation_problems(context)]
    if settings.dpo.files:
        job["pairs"] = _pairs(context, settings.dpo.files)
    job |= {f"{name}_model": str(context.path(f"{name}_model")) for name in settings.reward_models}
    result = context.run_job(
        "rl",
        settings=settings,
        model=str(context.path(policy)),
        problems=[context.path("problems") / TRAIN],
        **job,
    )
    return checkpoint_outcome(result, model, tables={"health": result["findings"]})


def _pairs(context: Context, files: Sequence[Path]) -> Path:
    """Writes the pairs of preference files, with whole responses, to one file. Leaves out prompts of the evaluation."""
    loaded = [load_preferences(PreferenceFile(path=path), held_out_share=0.0, whole=True).pairs for path in files]
    every = [pair for of_file in loaded for pair in of_file]
    if not every:
        raise InputError(f"{files[0]}: no pairs; dpo.files hold chosen and rejected responses, or ranked ones")
    if not (pairs := drop_duplicates(unevaluated(every, context.path("problems")))):
        raise InputError(f"{files[0]}: all pairs are about prompts of the evaluation")
    path = context.attempt.state / "pairs.parquet"
    write_preferences(path, pairs)
    return path


def _validation_problems(context: Context) -> Path:
    path = context.path("problems") / VALIDATION
    if not path.is_file():
        raise InputError(f"{context.stage.name}: validate_every needs problems.validation_share above 0")
    return path


def files(config: RL) -> dict[str, str | Path]:
    """The user's reward models, preference files and the judge's folder. Their contents enter the key; for hub models,
    their names."""
    used = config.supervision == "process" and is_folder(config.step_reward)
    models: dict[str, str | Path] = {f"{name}_model": model for name, model in config.reward_models.items()}
    models |= {f"pairs{number}": path for number, path in enumerate(config.dpo.files)}
    models |= config.judge.files() if config.judge else {}
    return models | ({"step_reward": config.step_reward} if used else {})


def user_code(config: RL) -> dict[str, Any]:
    """Digests of the user's reward functions, and of the judge's prompts, which enter the stage's key."""
    steps = [config.step_reward] if config.supervision == "process" and "step_reward" not in files(config) else []
    names = [name for name in [*config.rewards, *steps] if ":" in name]
    judged = {"judge_prompts": VERIFYING_DIGESTS} if config.judge else {}
    return judged | code_digests(names)


STAGE = Stage("reasoning_rl", 5, ("problems", "cold_start_data", "cold_start_sft"), build, files=files, extra=user_code)
