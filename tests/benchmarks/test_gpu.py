"""benchmarks/gpu.py from end to end on a CPU, in small: that it runs when there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {"models", "step", "resume", "throughput", "profile"}


@pytest.mark.system
def test_every_part_runs(tmp_path: Path) -> None:
    out, page = tmp_path / "gpu.json", tmp_path / "gpu.md"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--small", "--json", out, "--write", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert set(results) == {"machine", *PARTS}
    assert results["models"]["wrong"] == []
    assert results["resume"]["same_bits"]
    assert results["step"]["weights_lr"] == 0  # the CPU against itself
    assert results["throughput"]["small"]["update_tokens_per_s"] > 0
    assert "## Throughput" in page.read_text()
