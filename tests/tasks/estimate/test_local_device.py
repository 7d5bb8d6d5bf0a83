"""This machine's device, as a stand-in for nvidia-smi on PATH names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.estimate.local_device import local_device


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes nvidia-smi write these lines."""

    def make(*lines: str, code: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines), f"exit {code}"]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def ram() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def test_a_gpu_has_the_memory_that_its_driver_reports(says, tmp_path: Path) -> None:
    says("NVIDIA H100 80GB HBM3, 81559", "NVIDIA H100 80GB HBM3, 81559")
    device = local_device(tmp_path)
    assert (device.name, device.kind, device.memory) == ("NVIDIA H100 80GB HBM3", "cuda", 81559 * 2**20)
    assert device.host_memory == ram() / 2


@pytest.mark.parametrize("memory", ["[N/A]", "[Not Supported]", ""])
def test_a_gpu_without_memory_of_its_own_has_the_machines(memory: str, says, tmp_path: Path) -> None:
    says(f"NVIDIA GH200, {memory}")
    device = local_device(tmp_path)
    assert (device.name, device.memory, device.host_memory) == ("NVIDIA GH200", ram(), ram())


def test_an_unknown_gpu_is_named(says, tmp_path: Path) -> None:
    says("NVIDIA GB10, [N/A]")
    with pytest.raises(InputError, match="nothing is known of the GPU 'NVIDIA GB10'; give --device"):
        local_device(tmp_path)


@pytest.mark.parametrize(("line", "code"), [("No devices were found", 0), ("No devices were found", 6), ("", 0)])
def test_without_a_gpu_it_is_the_processor(line: str, code: int, says, tmp_path: Path) -> None:
    says(line, code=code)
    assert local_device(tmp_path).kind == "cpu"
