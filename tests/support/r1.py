"""The command r1 in a process of its own, and a recipe smaller still than `tiny`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
SMALLER = [
    "problems.sources.0.count=520",
    "problems.sources.0.min_terms=2",
    "problems.sources.0.max_terms=2",
    "problems.sources.1.count=200",
    "problems.held_out_max=24",
    "base.documents=6000",
    "base.pretrain.hidden=48",
    "base.pretrain.feed_forward=144",
    "base.pretrain.steps=400",
    "base.pretrain.save_every=50",
    "cold_start_data.problems=200",
    "cold_start_data.general=80",
    "reasoning_rl.steps=6",
    "reasoning_rl.save_every=2",
    "reasoning_rl.prompts_per_step=8",
    "sft_data.problems=150",
    "sft_data.general=60",
    "sft.epochs=1",
    "reward_models.prompts=60",
    "alignment_rl.steps=4",
    "alignment_rl.general_last_steps=2",
    "alignment_rl.prompts_per_step=8",
    "evaluate.problems=24",
    "evaluate.general=16",
    "r1_zero.steps=4",
    "r1_zero.prompts_per_step=8",
    "distill.students.0.base.documents=6000",
    "distill.students.0.base.pretrain.hidden=40",
    "distill.students.0.base.pretrain.feed_forward=120",
    "distill.students.0.base.pretrain.steps=300",
    "distill.students.0.sft.epochs=8",
    "distill.students.1.base.documents=6000",
    "distill.students.1.base.pretrain.hidden=24",
    "distill.students.1.base.pretrain.feed_forward=72",
    "distill.students.1.base.pretrain.steps=200",
    "rlhf_ppo.steps=4",
    "rlhf_ppo.general_last_steps=4",
    "rlhf_ppo.prompts_per_step=8",
    "process_reward_model.problems=60",
    "process_reward_model.samples_per_problem=2",
]


def pictured_digest(recipe: Path) -> str:
    """Digest of the part of a recipe file that pictures of the flow r1 show: without the sections that a recipe may
    leave out, which are those of other flows."""
    optional = {name for name, field in Recipe.model_fields.items() if field.default is None}
    shown = {name: value for name, value in tomllib.loads(recipe.read_text()).items() if name not in optional}
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


@dataclass
class R1:
    """The command r1 with a home of its own."""

    home: Path

    def __call__(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.environment(), input=stdin, timeout=3600
        )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        return {**kept, "R1FLOW_HOME": str(self.home), "PYTHONPATH": str(ROOT)}

    def tiny(self, command: str, *arguments: str) -> dict[str, Any]:
        """`r1 run|plan tiny`, made smaller, as JSON; it must succeed."""
        sets = [part for value in SMALLER for part in ("--set", value)]
        done = self(command, "tiny", *sets, *arguments, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])
