"""The study of the papers' claims, run with a small design."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import script_environment
from tests.support.installation import Installation

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


# The KL penalty of `second` makes its gradients infinite at the second step.
DIVERGING = (
    TWO_ROUNDS[: TWO_ROUNDS.index("[arms.first]")]
    .replace("budget_tokens = 1000", "budget_tokens = 10000")
    .replace('"reasoning_rl.rewards={accuracy = 1.0}"', "'reasoning_rl.rewards={accuracy = 1.0, \"LETTERS\" = 1.0}'")
    .replace("LETTERS", "tests.support.user_rewards:letters")
    .replace("  'reasoning_rl.supervision=\"process\"',\n  'reasoning_rl.step_reward=\"process_reward_model\"',\n", "")
    + """
[arms.first]
graph = "rl"
rate = "reasoning_rl.optimizer.learning_rate"
pilot_steps = 2

[arms.second]
graph = "rl"
like = "first"
overrides = [
  "reasoning_rl.kl_coef=1e30",
  "reasoning_rl.clip_eps_high=1e30",
  "reasoning_rl.optimizer.max_grad_norm=1e30",
]

[[claims]]
name = "learns"
says = "it learns"
source = "nobody"
contrasts = [{ higher = "first", lower = "second", outcome = "auc", margin = 0.02, sd = 0.02 }]
"""
)


def study(design: Path, home: Path, journal: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    places = ["--design", design, "--home", home, "--journal", journal, *flags]
    environment = script_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))  # for rewards of tests/
    return subprocess.run([sys.executable, SCRIPT, *places], capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.fixture
def r1flow(tmp_path: Path) -> Iterator[Installation]:
    installation = Installation(tmp_path / "home")
    installation.up()
    yield installation
    installation.down()


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


@pytest.mark.slow
def test_a_main_run_that_diverges_is_shown_and_the_study_ends_well(tmp_path: Path) -> None:
    (tmp_path / "design.toml").write_text(DIVERGING)
    done = study(tmp_path / "design.toml", tmp_path / "home", tmp_path / "journal.jsonl")
    assert done.returncode == 0, done.stderr
    pilot, first, second = lines(tmp_path / "journal.jsonl")
    assert (pilot["run"]["seed"], first["run"]["arm"], second["run"]["arm"]) == (0, "first", "second")
    assert second["diverged"].startswith("not_finite: step ") and "table" not in second
    assert f"second, {second['run']['steps']} steps, seed 2018: not_finite: step " in done.stdout
    assert "Where a larger share of right answers is expected, they count 0" in done.stdout


@pytest.mark.slow
def test_every_stage_runs_on_its_pool_when_dispatched(r1flow: Installation, tmp_path: Path) -> None:
    design, journal = tmp_path / "design.toml", tmp_path / "journal.jsonl"
    design.write_text(TWO_ROUNDS)
    done = study(design, r1flow.home, journal, "--dispatch")
    assert done.returncode == 0, done.stderr[-3000:] + r1flow.logs()
    first, second = lines(journal)
    assert (first["run"]["arm"], second["run"]["arm"]) == ("first", "second")
    # The first round trains the process reward model, which the second one keeps.
    expected = {name: 1 for name in ("problems", "base", "cold_start_data", "cold_start_sft", "process_reward_model")}
    found = {name: len(r1flow.stage(name)) for name in (*expected, "reasoning_rl", "evaluate")}
    assert found == expected | {"reasoning_rl": 2, "evaluate": 2}
    assert {run["work_pool_name"] for run in r1flow.stage("reasoning_rl")} == {"r1-gpu"}
    assert len(first["curve"]["tokens"]) == len(second["curve"]["tokens"]) == 2


@pytest.mark.slow
def test_dispatch_without_servers_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "design.toml").write_text(TWO_ROUNDS)
    done = study(tmp_path / "design.toml", tmp_path / "home", tmp_path / "journal.jsonl", "--dispatch")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"start it with R1FLOW_HOME={tmp_path / 'home'}" in done.stderr


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
