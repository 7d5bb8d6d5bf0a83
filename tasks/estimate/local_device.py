"""This machine's device, for estimates: a GPU by its name, or the processor, calibrated if `calibrate` has been run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from grpo.errors import InputError
from tasks.estimate.devices import DEVICES, Device

_FILE = "calibration.json"
MOST_CORES = 16
"""Cores that one job is assumed to make use of."""


def local_device(home: Path) -> Device:
    """This machine's GPU if it is a known one, else its processor.

    Raises:
        InputError: for a GPU that nothing is known of.
    """
    if (gpu := _gpu()) is not None:
        name, memory, count = gpu
        known = next((device for device in DEVICES.values() if device.name in name), None)
        if known is None:
            raise InputError(f"nothing is known of the GPU {name!r}; give --device, and --assume for what differs")
        return replace(known, name=name, memory=memory, host_memory=_ram() / count)
    return processor(home)


def processor(home: Path) -> Device:
    """The CPU of this machine as a device: its measured speed, else an assumed speed for each core."""
    return replace(_calibrated(home) or _assumed(), memory=_ram(), host_memory=_ram())


def calibrate(home: Path) -> Device:
    """Measures this machine's processor and stores the result; takes seconds."""
    done = subprocess.run(
        [sys.executable, "-m", "tasks.estimate.calibrate"], capture_output=True, text=True, env=_environment()
    )
    if done.returncode:
        raise InputError(f"calibration failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1][:300]}")
    home.mkdir(parents=True, exist_ok=True)
    partial = home / f"{_FILE}.{os.getpid()}"
    partial.write_text(done.stdout.splitlines()[-1])
    partial.replace(home / _FILE)
    return processor(home)


def _calibrated(home: Path) -> Device | None:
    """The measured speeds are effective, so the shares are 1."""
    try:
        measured = json.loads((home / _FILE).read_text())
    except FileNotFoundError:
        return None
    return replace(
        DEVICES["cpu"],
        name="this machine's processor, as measured",
        operations_16=measured["operations"],
        operations_32=measured["operations"],
        bandwidth=measured["bandwidth"],
        learning_share=1.0,
        sampling_share=1.0,
        layer_s=measured["layer_s"],
    )


def _assumed() -> Device:
    core, cores = DEVICES["cpu"], min(MOST_CORES, os.cpu_count() or 1)
    return replace(core, operations_16=cores * core.operations_16, operations_32=cores * core.operations_32)


def _gpu() -> tuple[str, float, int] | None:
    """Name and bytes of the first GPU, and how many there are."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    if not lines:
        return None
    name, _, mebibytes = lines[0].rpartition(",")
    return name.strip(), float(mebibytes) * 2**20, len(lines)


def _ram() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _environment() -> dict[str, str]:
    """Environment of a trainer: the same packages from any working directory."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
