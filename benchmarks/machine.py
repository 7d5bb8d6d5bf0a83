"""The machine and the commit that a benchmark ran on, in words."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_bf16": "AMX"}
"""Flags of /proc/cpuinfo that decide how fast a CPU multiplies, and their names."""
ROOT = Path(__file__).parents[1]
CODE = ("grpo", "tasks", "flows")
"""Folders of the code and the recipes."""


def machine() -> str:
    system = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    threads = os.environ.get("OMP_NUM_THREADS")  # another number rounds otherwise, and trains another model
    return f"{os.cpu_count()} CPU cores ({cpu()}{system}{f', OMP_NUM_THREADS={threads}' if threads else ''})"


def code_commit(*folders: str) -> str:
    """The last commit that changed the code or the recipes, or these folders, with a + if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments, "--", *(folders or CODE)]
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
        except FileNotFoundError:  # no git here
            return ""

    commit = git("log", "-1", "--format=%h")
    return (commit + "+" if git("status", "--porcelain") else commit) or "unknown"


def made_with() -> dict[str, str]:
    """Commit and machine, for the records of a benchmark: its own code counts too."""
    return {"commit": code_commit(*CODE, "benchmarks"), "machine": machine()}


def measured_by(command: str, made: Mapping[str, Any] | None = None) -> str:
    """First line of what a benchmark prints: its command, the commit and the machine; `made`: those of a record."""
    made = made or made_with()
    return f"`{command}`, at commit {made['commit']}, on {made['machine']}."


def machines(records: Iterable[Mapping[str, Any]]) -> str:
    """The machines of the records of a study, in words."""
    return " and on ".join(dict.fromkeys(record.get("machine", "a machine that is not recorded") for record in records))


def cpu(described: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and instructions, as "Intel Xeon Processor with AVX2, AVX-512; "; empty where Linux does not
    tell them."""
    text = described.read_text() if described.is_file() else ""
    name, flags = (re.search(rf"^{of}\s*: (.+)$", text, re.MULTILINE) for of in ("model name", "flags"))
    if not (name and flags):
        return ""
    words = re.sub(r"\((R|TM)\)|\bCPU\b|@.*", "", name[1]).split()
    known = [INSTRUCTIONS[flag] for flag in INSTRUCTIONS if flag in flags[1].split()]
    return f"{' '.join(words)} with {', '.join(known) or 'no AVX2'}; "


def peak_flops_per_s(size: int = 2048, runs: int = 8) -> float:
    """Of a float32 matrix product of torch in as many threads as it has here: the fastest of some."""
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds)
