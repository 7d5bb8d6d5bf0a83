"""The estimate of a recipe, stage by stage: time, memory, disk and network, and what to change if a stage does not fit.

estimate.json in the MLflow run of every recipe holds it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.home import home
from flows.recipe.data_sections import ColdStartData, SFTData
from flows.recipe.evaluation import Evaluate
from flows.recipe.process_rewards import ProcessRewards
from flows.recipe.schema import Recipe
from flows.recipe.sections import Base, RewardModels
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
from tasks.estimate.published import config_file, published
from tasks.estimate.stages import USABLE, Assumed, Estimate, Estimator

FILE = "estimate.json"
_TAGS = 4  # tokens that grpo.training.pretrain adds to its vocabulary


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate: the device, values that no setting gives, and the path of the base model's
    config.json if it is neither a local folder nor in the cache."""

    device: Device
    assumed: Assumed = field(default_factory=Assumed)
    config: Path | None = None


def estimate(graph: Sequence[Step], recipe: Recipe, assumptions: Assumptions) -> dict[str, Estimate]:
    """Stage -> its estimate.

    Raises:
        InputError: if the shape of the base model is not known.
    """
    estimates: dict[str, Estimate] = {}
    for step in graph:
        architecture = _architecture(_base_of(step.name, recipe), assumptions)
        estimator = Estimator(architecture, assumptions.device, assumptions.assumed)
        estimates[step.name] = _estimate_stage(step, recipe, estimator)
    return estimates


def to_json(estimates: Mapping[str, Estimate], assumptions: Assumptions) -> dict[str, Any]:
    """Plain values: assumptions, stages, and the sum of all."""
    total = sum(estimates.values(), Estimate())
    totals = {"seconds": total.seconds, "device_hours": total.device_seconds / 3600, "disk_gb": total.disk / 1e9}
    return {
        "device": asdict(assumptions.device),
        "assumed": asdict(assumptions.assumed),
        "stages": {name: estimate.plain() for name, estimate in estimates.items()},
        "total": totals,
    }


def for_record(graph: Sequence[Step], recipe: Recipe) -> str | None:
    """The estimate for this machine as JSON text, logged beside the measured values; None if the base model's shape or
    the GPU is not known."""
    try:
        assumptions = Assumptions(local_device(home()))
        return json.dumps(to_json(estimate(graph, recipe, assumptions), assumptions), indent=2)
    except InputError:
        return None


def _estimate_stage(step: Step, recipe: Recipe, estimator: Estimator) -> Estimate:
    name, config = step.name, step.config(recipe)
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
        policies, judged = len(checkpoints(step.stage.needs)), 2 if "reward_models" in step.stage.needs else 0
        prompts = min(config.problems, recipe.problems.held_out_max) + config.general
        asked = [(prompts, config.samples_per_problem, config.sampling)]
        asked += [(s.size, s.samples(config.samples_per_problem), s.sampling or config.sampling) for s in config.sets]
        cost = partial(estimator.sampled, hardware=config.hardware, engine=config.engine)
        return sum((cost(*each, policies=policies, reward_models=judged) for each in asked), Estimate())
    if isinstance(config, SFT):
        return _sft(name, config, recipe, estimator)
    return Estimate()  # problems and report: no model takes part


def _cold_start_data(config: ColdStartData, estimator: Estimator) -> Estimate:
    if config.sampling is None:
        prompts = config.problems + config.general
        return Estimate(disk=prompts * estimator.assumed.prompt_tokens * estimator.assumed.text_bytes)
    asked = config.problems, config.samples_per_problem, config.sampling
    return estimator.sampled(*asked, config.hardware, config.engine)


def _sft(name: str, config: SFT, recipe: Recipe, estimator: Estimator) -> Estimate:
    """SFT on the cold start's demonstrations, or on the samples that rejection sampling keeps."""
    data = recipe.sft_data
    share, length = estimator.assumed.kept_share, data.sampling.max_new_tokens
    sampled = (data.problems + data.general) * min(data.keep_per_problem, data.samples_per_problem * share)
    examples = data.mix.size(sampled)
    if name == "cold_start_sft":
        examples, length = recipe.cold_start_data.problems + recipe.cold_start_data.general, config.max_tokens
        length = min(length, recipe.reasoning_rl.sampling.max_new_tokens)
    tokens = min(config.max_tokens, estimator.assumed.prompt_tokens + length * estimator.assumed.completion_share)
    passes = config.epochs * examples
    if config.max_steps is not None:
        passes = min(passes, config.max_steps * config.batch_size)
    return estimator.supervised(config, passes * tokens, tokens, examples=examples)


def _reward_model_stage(config: RewardModels, estimator: Estimator) -> Estimate:
    """Sampling of the responses and training of both models on them; preferences from files are not counted."""
    if config.sampling is None:
        return Estimate()
    group = config.responses_per_prompt
    total = estimator.sampled(config.prompts, group, config.sampling, config.helpful.hardware, config.engine)
    length = estimator.assumed.prompt_tokens + config.sampling.max_new_tokens * estimator.assumed.completion_share
    for model in (config.helpful, config.safe):
        tokens = config.prompts * group * length * model.epochs
        total += estimator.supervised(model, tokens, length, model.ensemble)
    return total


def _step_model(config: ProcessRewards, estimator: Estimator) -> Estimate:
    """Sampling of the chains, rollouts from each of their steps, and training on them."""
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


def _base_of(stage: str, recipe: Recipe) -> Base:
    """The base model from which the stage's models descend."""
    name = stage.removeprefix("base_").removeprefix(PREFIX)
    students = recipe.distill.students if recipe.distill else []
    return next((student.base for student in students if student.name == name), recipe.base)


def _architecture(base: Base, assumptions: Assumptions) -> Architecture:
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
    path = assumptions.config or config_file(base.model)
    if path is None:
        return published(base.model)
    try:
        return Architecture.from_config(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a model's config.json ({error})") from None
    except KeyError as error:
        raise InputError(f"{path}: has no {error}, so the model's size is not known") from None


def first_misfit(estimates: Mapping[str, Estimate], device: Device) -> str | None:
    """The first stage whose peak memory does not fit the device, or its host; None if all fit."""
    return next((name for name, estimate in estimates.items() if not _fits(estimate, device)), None)


def misfit_message(
    stage: str, estimates: Mapping[str, Estimate], device: Device, with_overrides: Callable[[list[str]], Estimate]
) -> str:
    """One line for a stage that does not fit: its peak memory, and fields that would help.

    `with_overrides` gives the stage's estimate under further overrides of the recipe.
    """
    estimate = estimates[stage]
    if estimate.host > USABLE * device.host_memory:
        return (
            f"{stage} does not fit: it holds {estimate.host / 1e9:.1f} GB of the machine's memory for each device, of "
            f"{device.host_memory / 1e9:.1f} GB; take machines with more memory, or fewer processes on each"
        )
    assert estimate.memory is not None
    room = USABLE * device.memory

    def fits(overrides: list[str]) -> bool:
        try:
            return _fits(with_overrides(overrides), device)
        except InputError:  # this stage has no such field, or the field does not go with the others
            return False

    fields_alone: dict[str, str] = {}  # field -> override with its first value that is enough
    for change in _changes(stage, estimate):
        name = change.partition("=")[0]
        if name not in fields_alone and fits([change]):
            fields_alone[name] = change
    if fields_alone:
        remedy = f"one of these is enough: {', '.join([*fields_alone.values()][:4])}"
    else:
        together = [change for change in _strongest(stage, estimate) if _is_valid(with_overrides, [change])]
        remedy = f"together these fit: {' '.join(together)}" if fits(together) else "take devices with more memory"
    where = f"{estimate.devices} processes together" if device.kind == "cpu" and estimate.devices > 1 else "each device"
    needed_gb = _needed_memory(estimate, device) / 1e9
    return (
        f"{stage} does not fit: {estimate.memory.phase} holds {needed_gb:.1f} GB on {where}, and of "
        f"{device.name}'s {device.memory / 1e9:.1f} GB {room / 1e9:.1f} may be used; {remedy}"
    )


_FIELDS = {
    "hardware.processes": ("2", "4", "8"),
    "hardware.gradient_checkpointing": ("true",),
    "micro_batch_tokens": ("16384", "8192", "4096", "2048"),
    "sampling.batch_size": ("128", "64", "16"),
    "lora": ("{rank=32}",),
    "optimizer.kind": ("adamw_8bit",),
    "hardware.dtype": ("bfloat16",),
    "kl_coef": ("0.0",),
}
"""Fields of a stage's section that save memory, with values to try, from cheap to more intrusive."""


def _sections(stage: str) -> list[str]:
    special = {
        "reward_models": ["reward_models.helpful", "reward_models.safe"],
        "process_reward_model": ["process_reward_model.training"],
        "base": ["base.pretrain"],
    }
    return special.get(stage, [stage])


def _changes(stage: str, estimate: Estimate) -> Iterable[str]:
    for section in _sections(stage):
        for name, values in _FIELDS.items():
            for value in values:
                if name != "hardware.processes" or int(value) > estimate.devices:
                    yield f"{section}.{name}={value}"


def _strongest(stage: str, estimate: Estimate) -> list[str]:
    """The last value of each field, which saves most."""
    last = {change.partition("=")[0]: change for change in _changes(stage, estimate)}
    return list(last.values())


def _is_valid(with_overrides: Callable[[list[str]], Estimate], overrides: list[str]) -> bool:
    try:
        with_overrides(overrides)
    except InputError:
        return False
    return True


def _fits(estimate: Estimate, device: Device) -> bool:
    on_device = _needed_memory(estimate, device) <= USABLE * device.memory
    return on_device and estimate.host <= USABLE * device.host_memory


def _needed_memory(estimate: Estimate, device: Device) -> float:
    """Peak memory on one device, bytes. Processes on a CPU share its memory; on GPUs each has its own."""
    peak = estimate.memory.peak if estimate.memory else 0.0
    return peak * estimate.devices if device.kind == "cpu" else peak
