"""Homes that tries begin from: one for each target, with all stages before it, and one stopped after a checkpoint.

Every home is used at one path, since MLflow's database and Prefect's settings contain it: templates lie beside it and
are copied there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.store.store import Store
from tests.chaos.endpoint import URL, answer, endpoint
from tests.chaos.processes import end_all
from tests.chaos.zygote import Zygote
from tests.support.r1 import ROOT, SMALLER

SETS = [
    *SMALLER,
    "cold_start_sft.save_every=4",
    "reasoning_rl.steps=8",
    "reasoning_rl.group_size=4",
    f'sft_data.engine={{kind="endpoint",base_url="{URL}",model="m",timeout_s=10,retries=2}}',
    # As many retries as by default: what fails more often than that is undecided, and the data are others.
    f'sft_data.judge={{kind="openai",base_url="{URL}",model="m",timeout_s=10,backoff_s=0.05,away_max_s=40}}',
    "sft_data.problems=40",
    "sft_data.general=16",
    "sft_data.samples_per_problem=2",
]
ORDER = ("problems", "base", "cold_start_data", "cold_start_sft", "reasoning_rl", "sft_data")
TARGETS = ORDER[2:]
"""Stages that are disturbed: no trainer; a trainer; RL with reward workers; sampling and judging at an endpoint."""
R1 = [sys.executable, "-m", "flows.cli"]
CHECKPOINTED = ("cold_start_sft", "reasoning_rl")


@dataclass
class Homes:
    """The templates below one folder."""

    folder: Path
    prefect: str | None = None
    """The address of a Prefect server that runs are to use; None: each starts one of its own."""
    zygote: Zygote | None = None
    """Starts runs; None: each is a process of its own."""

    @property
    def home(self) -> Path:
        """Where every try lives."""
        return self.folder / "home"

    def command(self, target: str, *more: str) -> list[str]:
        """`r1 run` of one stage."""
        sets = [part for value in SETS for part in ("--set", value)]
        return [*R1, "run", "tiny", *sets, "--only", target, *more]

    def environment(self) -> dict[str, str]:
        """Variables of a run in the home."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "R1FLOW_"))}
        own = {"R1FLOW_HOME": str(self.home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if self.prefect:
            own["PREFECT_API_URL"] = self.prefect
        return {**kept, **own, "MPLCONFIGDIR": str(self.folder / "matplotlib")}

    def lay(self, template: str) -> None:
        """Put a fresh copy of a template where tries live."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.folder / template, self.home, symlinks=True)

    def expected(self, target: str) -> tuple[str, str]:
        """Key and digest of the target's artifact in an undisturbed run."""
        key, digest = json.loads((self.folder / "expected.json").read_text())[target]
        return key, digest

    def build(self, targets: Sequence[str] = TARGETS) -> None:
        """Make the templates of these stages, unless they are there and made from the same settings."""
        made_of = self.folder / "made_of.json"
        if made_of.exists() and json.loads(made_of.read_text()) == SETS:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.home.mkdir(parents=True)
        expected: dict[str, tuple[str, str]] = {}
        for stage in ORDER[: 1 + max(ORDER.index(target) for target in targets)]:
            if stage in targets:
                shutil.copytree(self.home, self.folder / f"before-{stage}")
            self._run(stage)
            manifest = Store(self.home).resolve(f"latest:{stage}")
            expected[stage] = manifest.key, manifest.digest
        self.home.rename(self.folder / "done")
        for stage in CHECKPOINTED:
            if stage in targets:
                self._stop_after_checkpoint(stage)
        (self.folder / "expected.json").write_text(json.dumps(expected, indent=2))
        made_of.write_text(json.dumps(SETS))

    def _run(self, stage: str) -> None:
        with endpoint(answer):
            done = subprocess.run(self.command(stage), env=self.environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{stage} undisturbed: {done.stderr[-3000:]}"

    def _stop_after_checkpoint(self, stage: str) -> None:
        """Template half-STAGE: everything was killed after the second checkpoint."""
        for _ in range(20):
            self.lay(f"before-{stage}")
            process = subprocess.Popen(self.command(stage), env=self.environment(), stderr=subprocess.DEVNULL)
            seen: set[Path] = set()
            while process.poll() is None and len(seen) < 2:
                seen |= set(self.home.glob(f"work/{stage}-*/state/trainer/step-*"))
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            end_all(self.home)
            if [*self.home.glob(f"work/{stage}-*/state/trainer/step-*/plain.pt")]:
                shutil.copytree(self.home, self.folder / f"half-{stage}")
                return
        raise AssertionError(f"{stage} never stopped behind a checkpoint")


def left_running(home: Path) -> int:
    """Runs that MLflow's database in the home calls RUNNING."""
    path = home / "mlflow.db"
    if not path.exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:  # sqlite locks its files, which not every way into a namespace allows
        for file in home.glob("mlflow.db*"):
            shutil.copy(file, folder)
        with sqlite3.connect(Path(folder) / "mlflow.db") as database:
            return int(database.execute("select count(*) from runs where status = 'RUNNING'").fetchone()[0])
