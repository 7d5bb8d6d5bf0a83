"""The estimate of a recipe, stage by stage: time, memory, disk and network, and what to change if a stage does not fit.

It is stored as estimate.json in the MLflow run of every recipe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.home import home, store
from flows.recipe.schema import Recipe
from flows.run.earlier_builds import EarlierBuilds
from flows.run.plan import existing
from flows.run.prompt_lengths import prompt_tokens
from flows.run.stage_work import architecture_of, base_of, computed
from flows.stage_contract.stage import Step
from flows.stages import problems
from grpo.errors import InputError
from tasks.estimate.devices import Device
from tasks.estimate.local_device import local_device
from tasks.estimate.stages import USABLE, Assumed, Estimate, Estimator
from tasks.store.manifest import Manifest

FILE = "estimate.json"
A_NODE, NODES = 8, (1, 2, 4, 8, 16, 32)
"""Devices of a machine, and numbers of machines, that a proposal tries."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate: the device, values that no setting determines, and the path of the base model's
    config.json if it is neither in a local folder nor in the cache."""

    device: Device
    assumed: Assumed = field(default_factory=Assumed)
    config: Path | None = None
    builds: Sequence[Manifest] = ()  # all artifacts of the store, oldest first; preferred to formulas


def with_prompts(assumptions: Assumptions, graph: Sequence[Step], recipe: Recipe) -> Assumptions:
    """The assumptions with the mean prompt length of the recipe's own problems, if they can be read here."""
    try:
        made = existing(problems.STAGE.name, graph, recipe)
    except InputError:  # a source's file is missing; reporting that is not the estimate's task
        made = None
    found = prompt_tokens(recipe, made)
    return replace(assumptions, assumed=replace(assumptions.assumed, prompt_tokens=found)) if found else assumptions


def estimate(graph: Sequence[Step], recipe: Recipe, assumptions: Assumptions) -> dict[str, Estimate]:
    """Stage -> its estimate.

    Raises:
        InputError: the architecture of the base model is unknown.
    """
    assumed = assumptions.assumed
    earlier = EarlierBuilds(assumptions.builds, assumptions.device, assumed)
    estimates: dict[str, Estimate] = {}
    for step in graph:
        architecture = architecture_of(base_of(step.name, recipe), assumptions.config)
        estimator = Estimator(architecture, assumptions.device, assumed)
        estimates[step.name] = earlier.correct(step, recipe, computed(step, step.config(recipe), recipe, estimator))
    return estimates


def to_json(estimates: Mapping[str, Estimate], assumptions: Assumptions) -> dict[str, Any]:
    """Plain values: assumptions, stages, and the total."""
    total = sum(estimates.values(), Estimate())
    totals = {"seconds": total.seconds, "device_hours": total.device_seconds / 3600, "disk_gb": total.disk / 1e9}
    return {
        "device": asdict(assumptions.device),
        "assumed": asdict(assumptions.assumed),
        "stages": {name: estimate.plain() for name, estimate in estimates.items()},
        "total": totals,
    }


def for_record(graph: Sequence[Step], recipe: Recipe) -> str | None:
    """The estimate for this machine as JSON text, logged next to the measured values. None if the base model's
    architecture or the GPU is unknown."""
    try:
        assumptions = with_prompts(Assumptions(local_device(home()), builds=store().list()), graph, recipe)
        return json.dumps(to_json(estimate(graph, recipe, assumptions), assumptions), indent=2)
    except InputError:
        return None


def misfits(estimates: Mapping[str, Estimate], device: Device) -> list[str]:
    """The stages whose peak memory does not fit the device or its host."""
    return [name for name, estimate in estimates.items() if not _fits(estimate, device)]


def misfit_message(
    stage: str, estimates: Mapping[str, Estimate], device: Device, with_overrides: Callable[[list[str]], Estimate]
) -> str:
    """One line for a stage that does not fit: its peak memory, and fields that would help.

    `with_overrides` returns the stage's estimate under further overrides of the recipe.
    """
    estimate = estimates[stage]
    return f"{stage} does not fit: {_shortage(estimate, device)}; {_remedy(stage, estimate, device, with_overrides)}"


def _shortage(estimate: Estimate, device: Device) -> str:
    """What is held of which memory."""
    if not _host_fits(estimate, device):
        return (
            f"it holds {estimate.host / 1e9:.1f} GB of the machine's memory for each device, of "
            f"{device.host_memory / 1e9:.1f} GB"
        )
    assert estimate.memory is not None
    where = f"{estimate.devices} processes together" if device.kind == "cpu" and estimate.devices > 1 else "each device"
    return (
        f"{estimate.memory.phase} holds {_needed_memory(estimate, device) / 1e9:.1f} GB on {where}, and of "
        f"{device.name}'s {device.memory / 1e9:.1f} GB {USABLE * device.memory / 1e9:.1f} may be used"
    )


def _remedy(stage: str, estimate: Estimate, device: Device, with_overrides: Callable[[list[str]], Estimate]) -> str:
    """Fields that were tried and make the stage fit, or what it needs instead."""

    def fits(overrides: list[str]) -> bool:
        try:
            return _fits(with_overrides(overrides), device)
        except InputError:  # this stage has no such field, or the field conflicts with others
            return False

    fields_alone: dict[str, str] = {}  # field -> override with the first value that is enough
    for change in _changes(stage, estimate):
        name = change.partition("=")[0]
        if name not in fields_alone and fits([change]):
            fields_alone[name] = change
    if fields_alone:
        return f"one of these is enough: {', '.join([*fields_alone.values()][:4])}"
    if device.kind != "cpu" and (enough := next(filter(fits, _on_more_devices(stage, estimate)), None)):
        return f"together these fit: {' '.join(enough)}"
    together = [change for change in _strongest(stage, estimate) if _is_valid(with_overrides, [change])]
    divides = any(_is_valid(with_overrides, change) for change in _on_more_devices(stage, estimate))
    samples = estimate.memory is not None and estimate.memory.phase == "sampling"
    if fits(together):
        return f"together these fit: {' '.join(together)}"
    if device.kind != "cpu" and divides and not samples:
        return (
            f"no number up to {A_NODE * NODES[-1]} fits; FSDP gathers whole layers, so models of this size need an "
            "engine with expert or pipeline parallelism: hardware.trainer, verl with strategy 'megatron' "
            "(docs/engines.md)"
        )
    # The stage has no processes to divide it among, or each of them samples with a whole model.
    return f"take {'devices' if _host_fits(estimate, device) else 'machines'} with more memory"


_FIELDS = {
    "hardware.processes": ("2", "4", "8"),
    "hardware.gradient_checkpointing": ("true",),
    "micro_batch_tokens": ("16384", "8192", "4096", "2048"),
    "hardware.sequence_parallel": ("2", "4", "8"),
    "sampling.batch_size": ("128", "64", "16"),
    "lora": ("{rank=32}",),
    "optimizer.kind": ("adamw_8bit",),
    "hardware.dtype": ("bfloat16",),
    "kl_coef": ("0.0",),
}
"""Fields of a stage's section that save memory, with values to try, from least to most intrusive."""


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


_ON_MORE_DEVICES = (
    (),
    ("hardware.gradient_checkpointing=true",),
    ("hardware.gradient_checkpointing=true", "micro_batch_tokens=16384"),
    ("hardware.gradient_checkpointing=true", "micro_batch_tokens=8192"),
)
"""Fields that a proposal of more devices sets, too: those that cost time alone first."""


def _on_more_devices(stage: str, estimate: Estimate) -> Iterable[list[str]]:
    """Overrides for ever more machines of eight devices."""
    for nodes in NODES:
        if nodes * A_NODE <= estimate.devices:
            continue
        for others in _ON_MORE_DEVICES:
            fields = (f"hardware.processes={A_NODE}", f"hardware.nodes={nodes}", *others)
            yield [f"{section}.{field}" for section in _sections(stage) for field in fields]


def _strongest(stage: str, estimate: Estimate) -> list[str]:
    """The last value of each field, which saves the most."""
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
    return on_device and _host_fits(estimate, device)


def _host_fits(estimate: Estimate, device: Device) -> bool:
    return estimate.host <= USABLE * device.host_memory


def _needed_memory(estimate: Estimate, device: Device) -> float:
    """Peak memory on one device, in bytes. Processes on a CPU share its memory; each GPU process has its own."""
    peak = estimate.peak or 0.0
    return peak * estimate.devices if device.kind == "cpu" else peak
