"""This machine's device for estimates: a GPU by name, or the CPU, with measured speeds if `calibrate` has been run."""

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
"""Maximum number of cores that one job is assumed to use."""


def local_device(home: Path) -> Device:
    """This machine's GPU if there is one, else its CPU.

    Raises:
        InputError: the GPU is unknown.
    """
    if (gpu := _gpu()) is not None:
        name, memory, count = gpu
        known = next((device for device in DEVICES.values() if device.name in name), None)
        if known is None:
            raise InputError(f"nothing is known of the GPU {name!r}; give --device, and --assume for what differs")
        ram = _ram() / count
        return replace(known, name=name, memory=ram if memory is None else memory, host_memory=ram)
    return processor(home)


def processor(home: Path) -> Device:
    """This machine's CPU as a device: with its measured speed, or else an assumed speed per core."""
    return replace(_calibrated(home) or _assumed(), memory=_ram(), host_memory=_ram())


def calibrate(home: Path) -> Device:
    """Measures this machine's CPU and stores the result. Takes seconds."""
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
    """The CPU with its measured speeds. These are effective speeds, so the shares are 1."""
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


def _gpu() -> tuple[str, float | None, int] | None:
    """Name and memory (bytes) of the first GPU, and the number of GPUs. The memory is None where the GPU has none of
    its own, but shares the machine's: then nvidia-smi reports [N/A]."""
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    gpus = [line.rpartition(",") for line in lines if "," in line]
    if not gpus:
        return None
    name, _, mebibytes = gpus[0]
    try:
        memory = float(mebibytes) * 2**20
    except ValueError:
        memory = None
    return name.strip(), memory, len(gpus)


def _ram() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _environment() -> dict[str, str]:
    """Environment of a trainer, so that it imports the same packages from any working directory."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
