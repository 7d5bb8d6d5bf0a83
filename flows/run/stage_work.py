"""The work that a stage has to compute, according to its configuration: which models, how much data, which jobs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from flows.recipe.data_sections import ColdStartData, SFTData
from flows.recipe.evaluation import Evaluate
from flows.recipe.process_rewards import ProcessRewards
from flows.recipe.schema import Recipe
from flows.recipe.sections import Base, Problems, RewardModels
from flows.stage_contract.stage import Step
from flows.stages.distill import PREFIX
from flows.stages.evaluate import checkpoints
from grpo.config.common import Hardware
from grpo.config.rl import RL
from grpo.config.supervised import SFT
from grpo.errors import InputError
from tasks.estimate.architecture import Architecture
from tasks.estimate.published import config_file, published
from tasks.estimate.stages import Estimate, Estimator

STAGE_S = 0.2
"""Seconds that any stage needs to read its inputs, publish and record. Assumed."""
START_S = 3.0
"""Seconds until a job has loaded its libraries and its model. Assumed: on two CPU cores the first of a run takes five,
those after it one, because they start from a process that has the libraries."""
RECORD_S = 3e-4
"""Seconds per problem or example that is made outside of trainers. Assumed."""
TOKENIZER_S = 0.5
"""Seconds until a stage that makes examples has loaded a tokenizer. Assumed."""
JOBS = {"reward_models": 3, "process_reward_model": 3}
"""Number of jobs, for stages that have more than one."""
_TAGS = 4  # tokens that grpo.training.pretrain adds to its vocabulary


def computed(step: Step, config: BaseModel, recipe: Recipe, estimator: Estimator) -> Estimate:
    """Estimate of a stage with this configuration, from formulas alone. Other sections are taken from `recipe`."""
    estimate = _work(step, config, recipe, estimator)
    jobs = (estimate.memory is not None) * JOBS.get(re.sub(r"_\d+$", "", step.name), 1)
    start = STAGE_S + START_S * jobs + RECORD_S * _records(config, recipe)
    start += TOKENIZER_S * isinstance(config, ColdStartData)
    seconds, held = estimate.seconds + start, estimate.device_seconds + start * estimate.devices
    if _is_split_by_megatron(config):  # whose memory and messages are not those of FSDP2
        estimate = replace(estimate, memory=None, host=0.0, network=0.0)
    return replace(estimate, seconds=seconds, device_seconds=held)


def _is_split_by_megatron(config: BaseModel) -> bool:
    trainer = getattr(getattr(config, "hardware", None), "trainer", None)
    return trainer is not None and trainer.megatron is not None


def _records(config: BaseModel, recipe: Recipe) -> float:
    """Number of problems or examples that a stage makes outside of trainers."""
    if isinstance(config, Problems):
        return sum(getattr(source, "count", None) or getattr(source, "limit", None) or 0 for source in config.sources)
    if isinstance(config, ColdStartData):
        return config.problems + config.general
    return 0


def _work(step: Step, config: BaseModel, recipe: Recipe, estimator: Estimator) -> Estimate:
    name = step.name
    if isinstance(config, Base):
        if config.pretrain is None:
            return estimator.copied(download=not Path(config.model or "").expanduser().exists())
        length = config.pretrain.context / 2
        return estimator.supervised(
            config.pretrain, config.pretrain.steps * config.pretrain.batch_size * length, length
        )
    if isinstance(config, RL):
        return estimator.rl(config, _reward_models(config, recipe))
    if isinstance(config, ColdStartData):
        return _cold_start_data(config, estimator)
    if isinstance(config, SFTData):
        hardware = config.hardware
        if config.ray is not None:
            hardware = Hardware(dtype=hardware.dtype, processes=config.ray.workers)
        prompts, group = config.problems + config.general, config.samples_per_problem
        return estimator.sampled(prompts, group, config.sampling, hardware, config.engine)
    if isinstance(config, ProcessRewards):
        return _step_model(config, estimator)
    if isinstance(config, RewardModels):
        return _reward_model_stage(config, estimator)
    if isinstance(config, Evaluate):
        policies = len(checkpoints(step.stage.needs))
        judged = 2 if config.alignment_scores and "reward_models" in step.stage.needs else 0
        reasoning, general = min(config.problems, recipe.problems.held_out_max), config.general
        alike = 0 if config.general_samples else general
        asked = [(reasoning + alike, config.samples_per_problem, config.sampling)]
        asked += [(general, config.general_samples, config.sampling)] if config.general_samples else []
        asked += [(s.size, s.samples(config.samples_per_problem), s.sampling or config.sampling) for s in config.sets]
        cost = partial(estimator.sampled, hardware=config.hardware, engine=config.engine)
        return sum((cost(*each, policies=policies, reward_models=judged) for each in asked), Estimate())
    if isinstance(config, SFT):
        return _sft(name, config, recipe, estimator)
    return Estimate()  # problems and report use no model


def _cold_start_data(config: ColdStartData, estimator: Estimator) -> Estimate:
    if config.sampling is None:
        prompts = config.problems + config.general
        return Estimate(disk=prompts * estimator.assumed.prompt_tokens * estimator.assumed.text_bytes)
    asked = config.problems, config.samples_per_problem, config.sampling
    return estimator.sampled(*asked, config.hardware, config.engine)


def _sft(name: str, config: SFT, recipe: Recipe, estimator: Estimator) -> Estimate:
    """SFT on the cold-start demonstrations, or on the samples that rejection sampling keeps."""
    data = recipe.sft_data
    share, length = estimator.assumed.kept_share, data.sampling.max_new_tokens
    sampled = (data.problems + data.general) * min(data.keep_per_problem, data.samples_per_problem * share)
    examples = data.mix.size(sampled)
    if name == "cold_start_sft":
        cold = recipe.cold_start_data
        written = cold.problems * (share if cold.source == "miniature" else 1.0)  # its writers slip, as a policy does
        examples, length = written + cold.general, config.max_tokens
        length = min(length, recipe.reasoning_rl.sampling.max_new_tokens)
    tokens = min(config.max_tokens, estimator.assumed.prompt_tokens + length * estimator.assumed.completion_share)
    passes = config.epochs * examples
    if config.max_steps is not None:
        passes = min(passes, config.max_steps * config.batch_size)
    return estimator.supervised(config, passes * tokens, tokens, examples=examples)


def _reward_model_stage(config: RewardModels, estimator: Estimator) -> Estimate:
    """Sampling responses and training both models on them. Preferences from files are not counted."""
    if config.sampling is None:
        return Estimate()
    group = config.responses_per_prompt
    total = estimator.sampled(config.prompts, group, config.sampling, config.helpful.hardware, config.engine)
    kept = group * estimator.assumed.kept_share
    length = estimator.assumed.prompt_tokens + config.sampling.max_new_tokens * estimator.assumed.completion_share
    for model in (config.helpful, config.safe):
        tokens = config.prompts * kept * length * model.epochs
        total += estimator.supervised(model, tokens, length, model.ensemble)
    return total


def _step_model(config: ProcessRewards, estimator: Estimator) -> Estimate:
    """Sampling chains, rollouts from each of their steps, and training on them."""
    assumed, sampling, training = estimator.assumed, config.sampling, config.training
    mean = sampling.max_new_tokens * assumed.completion_share
    chains, length = config.problems * config.samples_per_problem, assumed.prompt_tokens + mean
    total = estimator.sampled(config.problems, config.samples_per_problem, sampling, training.hardware)
    steps = chains * max(1.0, mean / assumed.step_tokens)
    total += replace(estimator.sampled(steps, config.rollouts, sampling, training.hardware), disk=0.0)
    return total + estimator.supervised(training, chains * length * training.epochs, length)


def _reward_models(config: RL, recipe: Recipe) -> int:
    models = {"helpful": recipe.reward_models.helpful, "safe": recipe.reward_models.safe}
    return sum(model.ensemble for name, model in models.items() if name in config.rewards)


def base_of(stage: str, recipe: Recipe) -> Base:
    """The base model from which the stage's models descend."""
    name = stage.removeprefix("base_" if stage.startswith("base_") else PREFIX)
    students = recipe.distill.students if recipe.distill else []
    return next((student.base for student in students if student.name == name), recipe.base)


def architecture_of(base: Base, config: Path | None = None) -> Architecture:
    """The model's architecture. `config`: path of its config.json if it is neither in a local folder nor in the cache.

    Raises:
        InputError: the architecture is unknown, or its config.json is none.
    """
    if settings := base.pretrain:
        return Architecture(
            layers=settings.layers,
            hidden=settings.hidden,
            feed_forward=settings.feed_forward,
            heads=settings.heads,
            key_heads=settings.heads,
            head_width=settings.hidden // settings.heads,
            vocabulary=settings.vocabulary + _TAGS,
            tied=True,
        )
    assert base.model is not None
    path = config or config_file(base.model)
    if path is None:
        return published(base.model)
    try:
        return Architecture.from_config(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as a model's config.json ({error})") from None
    except KeyError as error:
        raise InputError(f"{path}: has no {error}, so the model's size is not known") from None
