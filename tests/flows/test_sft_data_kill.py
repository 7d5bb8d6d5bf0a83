"""A large data set whose making is killed again and again is the one of an undisturbed run, to the byte."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.sft_data import SAMPLES
from grpo.data import read_samples

ROOT = Path(__file__).parents[2]
COUNT = 80_000
KILLS = 20


def start(home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "benchmarks/sft_data.py", "--one", str(COUNT), "--work", home]
    paths = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict:
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_killed_twenty_times_the_data_set_is_the_same(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    began = time.monotonic()
    expected = finish(start(undisturbed))
    took = time.monotonic() - began
    chance, kills, first = random.Random(0), 0, took
    while kills < KILLS:
        process = start(killed)
        # Most runs end before they get past their start; some get far into sampling, filtering or mixing.
        time.sleep(chance.uniform(0.2, 0.7) * first)
        assert process.poll() is None, "the run ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        first = max(14.0, first * 0.97)  # what is done is not done again, so the rest takes less time
    found = finish(start(killed))
    assert found["digest"] == expected["digest"]
    assert found["counts"] == expected["counts"]
    (folder,) = (killed / "artifacts" / "sft_data").glob("*/1")
    samples = read_samples(folder / SAMPLES)
    assert len({(s.problem_id, s.number) for s in samples}) == len(samples) == COUNT
