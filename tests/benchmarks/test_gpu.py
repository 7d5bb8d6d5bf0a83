"""benchmarks/gpu.py from end to end on a CPU, in small: that it runs when there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import script_environment

ROOT = Path(__file__).parents[2]
QUICK = ["models", "step", "resume", "throughput", "profile", "attention", "continuous", "shards", "waits"]
LONG = ["vllm", "trainer", "trl", "learning", "recipes"]


def run(folder: Path, parts: list[str]) -> dict[str, Any]:
    out, page = folder / "gpu.json", folder / "gpu.md"
    page.write_text("# Ours\n\n<!-- the rest is written by `benchmarks/gpu.py --write` -->\nold figures\n")
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--small", "--parts", *parts]
    command += ["--json", str(out), "--write", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=script_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text().startswith("# Ours\n") and "old figures" not in page.read_text()
    assert f"### {parts[-1].capitalize()}" in page.read_text()
    assert "MFU of an update at 1.5B: not measured, goal 0.45" in done.stdout
    results: dict[str, Any] = json.loads(out.read_text())
    assert set(results) == {"machine", *parts}
    return results


@pytest.mark.slow
def test_every_part_of_our_own_runs(tmp_path: Path) -> None:
    results = run(tmp_path, QUICK)
    assert results["models"]["wrong"] == []
    assert results["resume"]["same_bits"]
    assert results["step"]["weights_lr"] == 0  # the CPU against itself
    assert results["attention"]["difference"] < 1e-4
    assert {"sampling_tokens_per_s", "generate_tokens_per_s"} <= set(results["throughput"]["small"])
    assert results["continuous"]["tokens_per_s"] > 0
    assert results["shards"]["read_by_shards"] and results["shards"]["gradients"] == 0
    assert {name: results["waits"][name] for name in ("sampling", "update")} == {"sampling": None, "update": None}


@pytest.mark.slow
def test_the_comparisons_and_a_recipe_run(tmp_path: Path) -> None:
    results = run(tmp_path, LONG)
    for part, field in (("trainer", "tokens_per_s"), ("trl", "seconds")):
        assert len(results[part]) >= 2 and all(
            figures[field] > 0 for figures in results[part].values() if type(figures) is dict
        )
    assert len(results["learning"]["rewards"]) == 4
    assert results["recipes"]["tiny"]["base"] > 0


def test_goals_say_what_was_met_and_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_page

    results = {
        "machine": "a GPU",
        "throughput": {"1.5B": {"mfu": 0.5}},
        "vllm": {"engine": 80.0, "vllm": 100.0},
        "trl": {"ours": {"seconds": 2.0, "gb": 8.0}, "trl": {"seconds": 5.0}},
    }
    assert [figure for _, _, figure in gpu_page.goals(results)] == [0.5, 0.8, 2.5, None]
    told = [line.split("|")[-2].strip() for line in gpu_page.page(results).splitlines() if line.startswith("| ")]
    assert told == ["", "met", "missed", "met", ""]
