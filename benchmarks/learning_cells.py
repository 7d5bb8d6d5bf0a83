"""Cells of the study of learning: runs of the recipe, each with a seed, threads, a CPU level and a load beside it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from json_lines import add_line, read_lines
from machine import ROOT, code_commit, machine

Cpu = Literal["native", "avx2"]
Load = Literal["quiet", "busy"]
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse2,+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+popcnt",
}
"""What makes torch, oneDNN, MKL and numba compute as on a CPU without AVX-512."""


@dataclass(frozen=True)
class Cell:
    """What one run of the recipe is made with."""

    seed: int
    threads: int
    cpu: Cpu = "native"
    load: Load = "quiet"

    @property
    def name(self) -> str:
        return f"seed{self.seed}-{self.threads}t-{self.cpu}-{self.load}"

    def environment(self, home: Path) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": str(self.threads), "R1FLOW_HOME": str(home)}
        return {**os.environ, **own, **(AVX2 if self.cpu == "avx2" else {})}


def cells(seeds: Sequence[int], threads: Sequence[int], cpus: Sequence[Cpu], loads: Sequence[Load]) -> list[Cell]:
    """All combinations. Those of the first threads, CPU level and load come first, so that a study that is cut short
    has every seed once."""
    every = [Cell(*cell) for cell in itertools.product(seeds, threads, cpus, loads)]
    plain = [cell for cell in every if (cell.threads, cell.cpu, cell.load) == (threads[0], cpus[0], loads[0])]
    return plain + [cell for cell in every if cell not in plain]


@contextmanager
def load_beside(load: Load) -> Iterator[None]:
    """A process that keeps one core busy, if the load is busy."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if load == "busy" else None
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


def run(cell: Cell, recipe: str, work: Path) -> dict[str, Any]:
    """Runs the recipe in a home of its own, so that nothing is reused from another cell. Returns the cell's record."""
    home = work / cell.name
    began = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "run", recipe, "--seed", str(cell.seed), "--json"]
    with load_beside(cell.load):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=cell.environment(home))
    record: dict[str, Any] = {"cell": dataclasses.asdict(cell), "seconds": round(time.monotonic() - began, 1)}
    if done.returncode:
        return record | {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(home)
    return record | {"result": {name: result[name] for name in ("stages", "checkpoints")}}


class Journal:
    """A record a line, of every cell that was run; a study that is started again skips these. `version`: of the recipe,
    as `recipe_version` computes it."""

    def __init__(self, path: Path, recipe: str, version: str):
        self.path, self.mark = path, {"recipe": recipe, "version": version}
        self._made_with = {"commit": code_commit(), "machine": machine()}

    def records(self) -> dict[Cell, dict[str, Any]]:
        """Cell -> its record, of this version of the recipe."""
        found = {}
        for record in read_lines(self.path):
            if {name: record.get(name) for name in self.mark} == self.mark:
                found[Cell(**record["cell"])] = record
        return found

    def add(self, record: dict[str, Any]) -> None:
        add_line(self.path, self.mark | self._made_with | record)
