"""`r1 verify` in homes of real runs, while they run and after they were killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.store.manifest import artifact_key
from tasks.store.store import Store
from tests.flows.run.test_kill import family
from tests.support.r1 import SMALLER


def verify(r1: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = r1("verify", "--json", *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_exit_codes_and_lines(tmp_path: Path, r1: Any) -> None:
    mine, store = type(r1)(tmp_path), Store(tmp_path)
    clean = mine("verify")
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", f"nothing is wrong in {tmp_path}\n")
    with store.attempt("sft", artifact_key("sft", 1, {}, {})) as attempt:
        (attempt.out / "weights").write_text("sft")
        made = attempt.publish(stage_version=1, config={})
    (made.path / "weights").write_text("SFT")
    wrong = mine("verify", "--quick")
    name = f"artifacts/sft/{made.key}/1"
    line = f"corrupt   {name}: the contents of weights changed after it was made"
    assert (wrong.returncode, wrong.stdout) == (1, f"{line}\n")
    assert wrong.stderr == "1 wrong; `r1 verify --repair` mends what can be mended\n"
    mended = mine("verify", "--repair")
    assert (mended.returncode, mended.stdout) == (0, f"{line}; set aside in quarantine/sft/{made.key}/1.0\n")
    assert verify(mine) == (0, {"home": str(tmp_path), "findings": [], "left": 0})


@pytest.mark.slow
def test_a_live_run_is_left_alone_and_a_killed_one_is_ended(tmp_path: Path, r1: Any) -> None:
    mine = type(r1)(tmp_path)
    sets = [part for value in SMALLER for part in ("--set", value)]
    process = subprocess.Popen(
        mine.command("run", "tiny", *sets), env=mine.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not any(tmp_path.glob("work/base-*/trainer/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    assert verify(mine, "--repair") == (0, {"home": str(tmp_path), "findings": [], "left": 0})
    assert process.poll() is None
    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    time.sleep(20)  # a flow run counts as lost 20 s after its start
    code, said = verify(mine)
    assert code == 1 and {finding["kind"] for finding in said["findings"]} == {"running"}
    names = sorted(finding["what"].rpartition(" ")[0] for finding in said["findings"])
    assert names == ["MLflow run"] * 2 + ["Prefect flow run"] * 2, said  # the recipe and its stage
    code, said = verify(mine, "--repair")
    assert code == 0 and {finding["repaired"] for finding in said["findings"]} == {"marked KILLED", "marked Crashed"}
    assert verify(mine) == (0, {"home": str(tmp_path), "findings": [], "left": 0})
    mine.tiny("run", "--only", "base")  # goes on from what is left
