"""The estimate of a recipe, stage by stage: `r1 plan --estimate`, and estimate.json in the MLflow run of every recipe.

What is refused is what cannot fit: the memory of a stage's largest phase against that of the device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flows.evaluate import checkpoints
from flows.graphs import Step
from flows.home import home
from flows.progress import duration
from flows.recipe import Base, ColdStartData, Evaluate, Recipe, RewardModels, SFTData
from flows.recipe_file import load_recipe
from flows.students import PREFIX
from grpo.architecture import Architecture
from grpo.config import SFT, Hardware
from grpo.devices import DEVICES, Device
from grpo.errors import InputError
from grpo.rl_config import RL
from tasks.estimate import USABLE, Assumed, Estimate, Estimator
from tasks.local_device import calibrate, local_device, processor

FILE = "estimate.json"
_TAGS = 4  # tokens that grpo.pretrain adds to its vocabulary


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


def check(found: Mapping[str, Estimate], device: Device) -> str | None:
    """The first stage that does not fit the device, None if all do."""
    return next((name for name, of in found.items() if _needed(of, device) > USABLE * device.memory), None)


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


# ---- the stages ----


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


# ---- what does not fit ----


def _needed(of: Estimate, device: Device) -> float:
    """Processes on a processor share its memory; on GPUs each has one to itself."""
    peak = of.memory.peak if of.memory else 0.0
    return peak * of.devices if device.kind == "cpu" else peak


def refuse(stage: str, found: Mapping[str, Estimate], device: Device, again: Callable[[list[str]], Estimate]) -> str:
    """One line: the number that breaks, and fields that would help. `again`: overrides -> the stage's estimate."""
    of = found[stage]
    assert of.memory is not None
    room = USABLE * device.memory

    def fits(overrides: list[str]) -> bool:
        try:
            return _needed(again(overrides), device) <= room
        except InputError:  # this stage has no such field, or it does not go with the others
            return False

    fields_alone: dict[str, str] = {}  # the first value that is enough, of each field
    for change in _changes(stage, of):
        name = change.partition("=")[0]
        if name not in fields_alone and fits([change]):
            fields_alone[name] = change
    if fields_alone:
        remedy = f"one of these is enough: {', '.join([*fields_alone.values()][:4])}"
    else:
        together = [change for change in _best_of_each(stage, of) if _valid(again, [change])]
        remedy = f"together these fit: {' '.join(together)}" if fits(together) else "take devices with more memory"
    where = f"{of.devices} processes together" if device.kind == "cpu" and of.devices > 1 else "each device"
    return (
        f"{stage} does not fit: {of.memory.phase} holds {_needed(of, device) / 1e9:.1f} GB on {where}, and of "
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
"""What a stage's section may have that saves memory, from what costs little to what changes more."""


def _sections(stage: str) -> list[str]:
    special = {"reward_models": ["reward_models.helpful", "reward_models.safe"], "base": ["base.pretrain"]}
    return special.get(stage, [stage])


def _changes(stage: str, of: Estimate) -> Iterable[str]:
    for section in _sections(stage):
        for name, values in _FIELDS.items():
            for value in values:
                if name != "hardware.processes" or int(value) > of.devices:
                    yield f"{section}.{name}={value}"


def _best_of_each(stage: str, of: Estimate) -> list[str]:
    """The last value of each field: the one that saves most."""
    last = {change.partition("=")[0]: change for change in _changes(stage, of)}
    return list(last.values())


def _valid(again: Callable[[list[str]], Estimate], overrides: list[str]) -> bool:
    try:
        again(overrides)
    except InputError:
        return False
    return True


# ---- the command ----


def assumptions(given: argparse.Namespace) -> Assumptions:
    """From the command line."""
    if given.device is not None and given.device not in DEVICES:
        raise InputError(f"--device {given.device}: give one of {', '.join(DEVICES)}, and --assume for what differs")
    device = calibrate(home()) if given.calibrate else _device(given.device)
    assumed = Assumed()
    for pair in given.assume:
        name, _, value = pair.partition("=")
        try:
            change: dict[str, Any] = {name: float(value)}
        except ValueError:
            raise InputError(f"--assume {pair}: write NAME=NUMBER") from None
        if change[name] <= 0:
            raise InputError(f"--assume {pair}: give a number above 0")
        if name in {of.name for of in fields(Assumed)}:
            assumed = replace(assumed, **change)
        elif name in {of.name for of in fields(Device)} - {"name", "kind"}:
            device = replace(device, **change)
        else:
            known = [of.name for of in (*fields(Assumed), *fields(Device)) if of.name not in ("name", "kind")]
            raise InputError(f"--assume {pair}: unknown; there are {', '.join(known)}")
    return Assumptions(device, assumed, given.config)


def _device(name: str | None) -> Device:
    if name is None:
        return local_device(home())
    return processor(home()) if name == "cpu" else DEVICES[name]


def make(given: argparse.Namespace, graph: Sequence[Step], recipe: Recipe) -> dict[str, Any]:
    """The estimate of `r1 plan` as plain values.

    Raises:
        InputError: in one line, if a stage does not fit the device.
    """
    with_device = assumptions(given)
    found = estimate(graph, recipe, with_device)
    if (stage := check(found, with_device.device)) is not None:

        def again(overrides: list[str]) -> Estimate:
            changed = load_recipe(given.recipe, [*given.overrides, *overrides], given.seed)
            return estimate([step for step in graph if step.name == stage], changed, with_device)[stage]

        raise InputError(refuse(stage, found, with_device.device, again))
    return to_json(found, with_device)


def show(made: Mapping[str, Any], running: Sequence[str]) -> None:
    """A table for people; `running` are the stages that would run, which the sum is of."""
    device = made["device"]
    print(f"\nestimate for {device['name']}, from settings and assumptions ({FILE} of a run has all of them):")
    print(f"  {'':<16} {'devices':>7} {'device-h':>9} {'time':>9} {'peak GB':>8} {'':<10} {'disk GB':>8} {'net GB':>8}")
    for name, of in made["stages"].items():
        peak = f"{of['peak_memory_gb']:8.2f} {of['peak_phase']:<10}" if "peak_memory_gb" in of else f"{'':8} {'':<10}"
        rest = f"{of['disk_gb']:8.2f} {of['network_gb']:8.1f}"
        print(f"  {name:<16} {of['devices']:>7} {of['device_hours']:9.2f} {duration(of['seconds']):>9} {peak} {rest}")
    hours = sum(made["stages"][name]["device_hours"] for name in running)
    seconds = sum(made["stages"][name]["seconds"] for name in running)
    print(f"  {'to run':<16} {'':>7} {hours:9.2f} {duration(seconds):>9}")
