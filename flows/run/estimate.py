"""The estimate of a recipe, stage by stage, as estimate.json in the MLflow run of every recipe has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flows.home import home
from flows.recipe.schema import Recipe
from flows.recipe.sections import Base, ColdStartData, Evaluate, RewardModels, SFTData
from flows.stages.contract import Step
from flows.stages.distill import PREFIX
from flows.stages.evaluate import checkpoints
from grpo.config.common import Hardware
from grpo.config.rl import RL
from grpo.config.supervised import SFT
from grpo.errors import InputError
from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import Device
from tasks.estimate.local_device import local_device
from tasks.estimate.stages import Assumed, Estimate, Estimator

FILE = "estimate.json"
_TAGS = 4  # tokens that grpo.training.pretrain adds to its vocabulary


@dataclass(frozen=True)
class Assumptions:
    """Of an estimate: the device, what no setting says, and the base model's config.json where it is not at hand."""

    device: Device
    assumed: Assumed = field(default_factory=Assumed)
    config: Path | None = None


def estimate(graph: Sequence[Step], recipe: Recipe, given: Assumptions) -> dict[str, Estimate]:
    """Stage -> what it will take.

    Raises:
        InputError: if the shape of the base model is not known.
    """
    found: dict[str, Estimate] = {}
    for step in graph:
        a = _shape(_base_of(step.name, recipe), given)
        found[step.name] = _of_stage(step, recipe, Estimator(a, given.device, given.assumed))
    return found


def to_json(found: Mapping[str, Estimate], given: Assumptions) -> dict[str, Any]:
    """Plain values: assumptions, stages, and the sum of all."""
    total = sum(found.values(), Estimate())
    of_all = {"seconds": total.seconds, "device_hours": total.device_seconds / 3600, "disk_gb": total.disk / 1e9}
    return {
        "device": asdict(given.device),
        "assumed": asdict(given.assumed),
        "stages": {name: of.plain() for name, of in found.items()},
        "total": of_all,
    }


def for_record(graph: Sequence[Step], recipe: Recipe) -> str | None:
    """The estimate for this machine as JSON text, to be logged beside what really happens; None where nothing is known
    of the base model's shape or of the GPU."""
    try:
        given = Assumptions(local_device(home()))
        return json.dumps(to_json(estimate(graph, recipe, given), given), indent=2)
    except InputError:
        return None


def _of_stage(step: Step, recipe: Recipe, of: Estimator) -> Estimate:
    name, config = step.name, step.config(recipe)
    if isinstance(config, Base):
        if config.pretrain is None:
            return of.copied(download=not Path(config.model or "").expanduser().exists())
        length = config.pretrain.context / 2
        return of.supervised(config.pretrain, config.pretrain.steps * config.pretrain.batch_size * length, length)
    if isinstance(config, RL):
        return of.rl(config, _reward_models(config, recipe))
    if isinstance(config, ColdStartData):
        return _cold_start_data(config, of)
    if isinstance(config, SFTData):
        hardware = config.hardware
        if config.ray is not None:
            hardware = Hardware(dtype=hardware.dtype, processes=config.ray.workers)
        prompts, group = config.problems + config.general, config.samples_per_problem
        return of.sampled(prompts, group, config.sampling, hardware, config.engine)
    if isinstance(config, RewardModels):
        return _reward_model_stage(config, of)
    if isinstance(config, Evaluate):
        policies = len(checkpoints(step.stage.needs))
        judged = 2 if "reward_models" in step.stage.needs else 0
        prompts = min(config.problems, recipe.problems.held_out_max) + config.general
        sampled = (prompts, config.samples_per_problem, config.sampling, config.hardware)
        return of.sampled(*sampled, policies=policies, reward_models=judged)
    if isinstance(config, SFT):
        return _sft(name, config, recipe, of)
    return Estimate()  # problems and report: no model takes part


def _cold_start_data(config: ColdStartData, of: Estimator) -> Estimate:
    if config.source != "sampled" or config.sampling is None:
        return Estimate(disk=(config.problems + config.general) * of.assumed.prompt_tokens * of.assumed.text_bytes)
    return of.sampled(config.problems, config.samples_per_problem, config.sampling, config.hardware)


def _sft(name: str, config: SFT, recipe: Recipe, of: Estimator) -> Estimate:
    """On the cold start's demonstrations, or on what rejection sampling keeps of a prompt's samples."""
    data = recipe.sft_data
    share, length = of.assumed.kept_share, data.sampling.max_new_tokens
    examples = (data.problems + data.general) * min(data.keep_per_problem, data.samples_per_problem * share)
    if name == "cold_start_sft":
        examples, length = recipe.cold_start_data.problems + recipe.cold_start_data.general, config.max_tokens
        length = min(length, recipe.reasoning_rl.sampling.max_new_tokens)
    tokens = min(config.max_tokens, of.assumed.prompt_tokens + length * of.assumed.completion_share)
    passes = config.epochs * examples
    if config.max_steps is not None:
        passes = min(passes, config.max_steps * config.batch_size)
    return of.supervised(config, passes * tokens, tokens)


def _reward_model_stage(config: RewardModels, of: Estimator) -> Estimate:
    """Responses, then both models on them; preferences from files are not counted."""
    if config.sampling is None:
        return Estimate()
    group = config.responses_per_prompt
    found = of.sampled(config.prompts, group, config.sampling, config.helpful.hardware)
    length = of.assumed.prompt_tokens + config.sampling.max_new_tokens * of.assumed.completion_share
    for model in (config.helpful, config.safe):
        tokens = config.prompts * group * length * model.epochs
        found += of.supervised(model, tokens, length, model.ensemble)
    return found


def _reward_models(config: RL, recipe: Recipe) -> int:
    models = {"helpful": recipe.reward_models.helpful, "safe": recipe.reward_models.safe}
    return sum(model.ensemble for name, model in models.items() if name in config.rewards)


def _base_of(stage: str, recipe: Recipe) -> Base:
    """The model whose shape the stage's models have."""
    name = stage.removeprefix("base_").removeprefix(PREFIX)
    students = recipe.distill.students if recipe.distill else []
    return next((student.base for student in students if student.name == name), recipe.base)


def _shape(base: Base, given: Assumptions) -> Architecture:
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
    path = given.config or _config_of(base.model)
    try:
        return Architecture.from_config(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a model's config.json ({error})") from None
    except KeyError as error:
        raise InputError(f"{path}: has no {error}, so the model's size is not known") from None


def _config_of(model: str) -> Path:
    folder = Path(model).expanduser()
    if folder.exists() or model.startswith((".", "/", "~")):
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json")
    if not isinstance(cached, str):
        raise InputError(f"{model}: its config.json is not on this machine; download it and give it with --config FILE")
    return Path(cached)
