"""kill -9 of everything at once; the same command again continues and ends with whole artifacts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

LONGER = ["--set", "reasoning_rl.steps=40", "--set", "sft_data.samples_per_problem=8"]


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def kill_when(r1: Any, arguments: list[str], ready: Callable[[], bool]) -> None:
    """Start `r1`, wait until `ready`, SIGKILL it and everything below it."""
    process = subprocess.Popen(
        r1.command(*arguments), env=r1.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not ready():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def steps(home: Path, stage: str) -> int:
    """Metrics lines that the stage under way has written."""
    return sum(len(p.read_text().splitlines()) for p in home.glob(f"work/{stage}-*/trainer/metrics.jsonl"))


def test_killed_in_reasoning_rl_and_in_data_generation(r1: Any, first_run: dict[str, Any], tmp_path: Path) -> None:
    """Against `first_run`'s home, so that the stages before are there; with its own settings, so that these are not."""
    r1.tiny("run", *LONGER, "--seed", "0", "--only", "problems")  # the home is warm
    home = r1.home
    arguments = ["run", "tiny", *(p for v in first_run["sets"] for p in ("--set", v)), *LONGER, "--json"]
    kill_when(r1, arguments, lambda: steps(home, "reasoning_rl") >= 15)
    checkpoint = max(p.name for p in home.glob("work/reasoning_rl-*/state/trainer/step-*"))
    kill_when(r1, arguments, lambda: any(home.glob("work/sft_data-*/state/raw/dev2")))
    again = subprocess.run(r1.command(*arguments), env=r1.environment(), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    result = json.loads(again.stdout.splitlines()[-1])
    assert checkpoint >= "step-00000014"
    status = {stage["name"]: stage["status"] for stage in result["stages"]}
    assert status["cold_start_sft"] == status["reasoning_rl"] == "reused" and status["sft_data"] == "ran"
    for stage in result["stages"]:
        folder = next(home.glob(f"artifacts/{stage['name']}/{stage['key']}/*"))
        manifest = json.loads((folder / "manifest.json").read_text())
        assert all((folder / name).stat().st_size == entry["size"] for name, entry in manifest["files"].items())
    assert not list(home.glob("work/*"))

    # The same, never killed, in a home of its own: the same bytes.
    calm = type(r1)(tmp_path)
    undisturbed = calm.tiny("run", *LONGER)
    for stage in ("reasoning_rl", "sft_data"):
        digests = [
            json.loads(next(h.glob(f"artifacts/{stage}/{s['key']}/1/manifest.json")).read_text())["digest"]
            for h, r in ((home, result), (tmp_path, undisturbed))
            for s in r["stages"]
            if s["name"] == stage
        ]
        assert digests[0] == digests[1]
