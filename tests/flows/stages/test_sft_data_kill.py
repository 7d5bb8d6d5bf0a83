"""A large data set whose making is killed again and again is the one of an undisturbed run, to the byte."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.stages.sft_data import SAMPLES
from grpo.data.records import read_samples
from tests.support.environments import script_environment

ROOT = Path(__file__).parents[3]
COUNT = 80_000
KILLS = 20


def start(home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "benchmarks/sft_data.py", "--one", str(COUNT), "--work", home]
    return subprocess.Popen(
        command,
        env=script_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def made(process: subprocess.Popen[str]) -> dict:
    """The JSON that a finished run prints."""
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0
    found = json.loads(output.splitlines()[-1])
    return {name: found[name] for name in ("digest", "counts")}


@pytest.mark.slow
def test_killed_twenty_times_the_data_set_is_the_same(tmp_path):
    began = time.monotonic()
    expected = made(start(tmp_path / "undisturbed"))
    took = time.monotonic() - began
    chance, kills, home = random.Random(0), 0, tmp_path / "killed"
    while kills < KILLS:
        process = start(home)
        # From the imports to the mix: a run that goes on from earlier ones is further, and may end first.
        time.sleep(chance.uniform(0.1, 1.0) * took)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            assert made(process) == expected
            shutil.rmtree(home)
    assert made(start(home)) == expected
    (folder,) = (home / "artifacts" / "sft_data").glob("*/1")
    samples = read_samples(folder / SAMPLES)
    assert len({(s.problem_id, s.number) for s in samples}) == len(samples) == COUNT
