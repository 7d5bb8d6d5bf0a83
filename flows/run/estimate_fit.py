"""What cannot fit: the memory of a stage's largest phase against that of the device, and settings that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from grpo.errors import InputError
from tasks.estimate.devices import Device
from tasks.estimate.stages import USABLE, Estimate


def check(found: Mapping[str, Estimate], device: Device) -> str | None:
    """The first stage that does not fit the device, None if all do."""
    return next((name for name, of in found.items() if _needed(of, device) > USABLE * device.memory), None)


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


def _needed(of: Estimate, device: Device) -> float:
    """Processes on a processor share its memory; on GPUs each has one to itself."""
    peak = of.memory.peak if of.memory else 0.0
    return peak * of.devices if device.kind == "cpu" else peak
