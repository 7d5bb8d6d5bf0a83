"""The study of the papers' claims, run with a small design."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import script_environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "paper_claims.py"
TWO_ROUNDS = """
recipe = "tiny"
overrides = [
  'name="two-rounds"',
  "base.documents=2000",
  "base.pretrain.steps=1",
  "cold_start_data.problems=32",
  "cold_start_data.general=0",
  "cold_start_sft.epochs=1",
  'reasoning_rl.supervision="process"',
  'reasoning_rl.step_reward="process_reward_model"',
  "reasoning_rl.rewards={accuracy = 1.0}",
  "reasoning_rl.prompts_per_step=4",
  "process_reward_model.problems=8",
  "evaluate.problems=4",
  "evaluate.samples_per_problem=1",
  "evaluate.general=0",
]
budget_tokens = 1000

[seeds]
from = 2000
count = 1
first_digits = "0123"
tuned_on = [0]

[learning_rates]
grid = [1e-4]

[decision]
level = 0.95
resamples = 1000

[seconds]
step = 0.5
run = 3

[seconds.stages]
problems = 6
base = 7
cold_start_data = 6
cold_start_sft = 12
process_reward_model = 40
evaluate = 12

[arms.first]
graph = "rl"
steps = 2

[arms.second]
graph = "rl"
like = "first"
steps = 2
after = "first"
keeps = ["process_reward_model"]

[[claims]]
name = "rounds"
says = "a second round helps"
source = "nobody"
contrasts = [{ higher = "second", lower = "first", outcome = "pass@1", margin = 0.02, sd = 0.02 }]
"""

THIRD_ROUND = """
[arms.third]
graph = "rl"
like = "first"
steps = 2
after = "second"
"""


def study(design: Path, home: Path, journal: Path) -> subprocess.CompletedProcess[str]:
    places = ["--design", design, "--home", home, "--journal", journal]
    environment = script_environment(OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, SCRIPT, *places], capture_output=True, text=True, cwd=ROOT, env=environment)


def lines(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines() if line.strip()]


@pytest.mark.slow
def test_a_second_round_whose_first_was_made_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "design.toml").write_text(TWO_ROUNDS)
    whole, half = tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    done = study(tmp_path / "design.toml", tmp_path / "a", whole)
    assert done.returncode == 0, done.stderr
    first, second = lines(whole)
    assert (first["run"]["arm"], second["run"]["arm"]) == ("first", "second")
    # As on a CPU that rounds differently: there the first round has other keys, which this home does not have.
    elsewhere = first | {"keys": dict.fromkeys(first["keys"], "0" * 64)}
    half.write_text(json.dumps(elsewhere) + "\n")
    done = study(tmp_path / "design.toml", tmp_path / "b", half)
    assert done.returncode == 0, done.stderr
    again = lines(half)[1]
    assert {name: again[name] for name in ("run", "keys", "curve")} == {
        name: second[name] for name in ("run", "keys", "curve")
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWO_ROUNDS.replace("resamples = 1000", "resamples = 10"), "decision.resamples: Input should be greater"),
        (TWO_ROUNDS.replace("budget_tokens = 1000", "budget_tokens ="), "Invalid value (at line"),
        (TWO_ROUNDS + THIRD_ROUND, "arm third: 'second' is a second round itself"),
        (TWO_ROUNDS.replace('recipe = "tiny"', 'recipe = "nope"'), "nope"),
        (None, "No such file"),
    ],
    ids=["a value", "no TOML", "a third round", "no recipe", "no file"],
)
def test_a_design_that_cannot_be_read_is_one_line(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "design.toml").write_text(text)
    done = study(tmp_path / "design.toml", tmp_path / "home", tmp_path / "journal.jsonl")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and says in last and "design.toml" in last and "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()
