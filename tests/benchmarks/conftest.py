"""Makes the scripts of benchmarks/ importable, and forgets them after each test: their names are plain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which some of them set for their processes
    yield
    for name in {script.stem for script in BENCHMARKS.glob("*.py")} - before:
        sys.modules.pop(name, None)
