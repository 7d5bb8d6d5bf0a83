"""Stages whose memory does not fit the device, each in one sentence: what is short, and what to set instead."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.estimate.devices import Device
from tasks.estimate.stages import USABLE, Estimate


def fits(estimate: Estimate, device: Device) -> bool:
    """Whether a stage fits the device and its host."""
    on_device = needed_memory(estimate, device) <= USABLE * device.memory
    return on_device and host_fits(estimate, device) and engine_starts(estimate)


def engine_starts(estimate: Estimate) -> bool:
    """Whether vLLM's weights fit into its share of the device. A stage that ran like this has shown it."""
    engine = estimate.memory.engine if estimate.memory else None
    return engine is None or engine.room >= 0 or estimate.source == "measured"


def host_fits(estimate: Estimate, device: Device) -> bool:
    """Whether the host memory of each process fits its share of the machine's."""
    return estimate.host <= USABLE * device.host_memory


def needed_memory(estimate: Estimate, device: Device) -> float:
    """Peak memory on one device, in bytes. Processes on a CPU share its memory; each GPU process has its own."""
    peak = estimate.peak or 0.0
    return peak * estimate.devices if device.kind == "cpu" else peak


def misfits(estimates: Mapping[str, Estimate], device: Device) -> list[str]:
    """The stages whose peak memory does not fit the device or its host."""
    return [name for name, estimate in estimates.items() if not fits(estimate, device)]


def sentence(stage: str, estimate: Estimate, device: Device, remedy: str) -> str:
    """A stage that does not fit: its peak memory, and what would help."""
    return f"{stage} does not fit: {_shortage(estimate, device)}; {remedy}"


def _shortage(estimate: Estimate, device: Device) -> str:
    """What is held of which memory."""
    if not host_fits(estimate, device):
        return (
            f"it holds {estimate.host / 1e9:.1f} GB of the machine's memory for each device, of "
            f"{device.host_memory / 1e9:.1f} GB"
        )
    assert estimate.memory is not None
    engine, needed = estimate.memory.engine, needed_memory(estimate, device)
    if engine is not None and needed <= USABLE * device.memory:
        return (
            f"vLLM gets {engine.taken / 1e9:.1f} GB of each device, and needs {engine.weights / 1e9:.1f} GB for "
            f"weights, {engine.cache / 1e9:.1f} for a longest sequence and {engine.passes / 1e9:.1f} to compute"
        )
    where = f"{estimate.devices} processes together" if device.kind == "cpu" and estimate.devices > 1 else "each device"
    return (
        f"{estimate.memory.phase} holds {needed / 1e9:.1f} GB on {where}, and of "
        f"{device.name}'s {device.memory / 1e9:.1f} GB {USABLE * device.memory / 1e9:.1f} may be used"
    )
