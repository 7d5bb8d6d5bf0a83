"""Gates in the whole recipe for real: what they stop, what they let pass, and who is asked on one machine."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import Pause

from flows.recipe.load import load_recipe
from flows.run.gates.checks import check_gates
from flows.run.gates.gatekeeper import Gatekeeper
from flows.stage_graphs import GRAPHS
from grpo.errors import InputError
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tests.support.r1 import SMALLER

pytestmark = pytest.mark.system

MANY = 'metric = "reasoning_train", above = 1000000'
FEW = 'metric = "reasoning_train", above = 10'


def gates(*each: str) -> tuple[str, str]:
    """`--set` with these gates."""
    return ("--set", f"gates=[{', '.join('{' + gate + '}' for gate in each)}]")


def after_problems(condition: str, more: str = "") -> str:
    return f'name = "enough", after = "problems", conditions = [{{{condition}}}]{more}'


def attempt(r1: Any, *arguments: str) -> tuple[int, dict[str, Any], list[str]]:
    """(exit code, JSON result, lines of stderr) of `r1 run tiny`, made smaller."""
    sets = [part for value in SMALLER for part in ("--set", value)]
    done = r1("run", "tiny", *sets, *arguments, "--json")
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr.strip().splitlines()


def tags(r1: Any, run_id: str) -> dict[str, str]:
    database = sqlite3.connect(r1.home / "mlflow.db")
    return dict(database.execute("select key, value from tags where run_uuid = ?", (run_id,)).fetchall())


@pytest.mark.slow
def test_a_failing_gate_stops_before_the_next_stage_spends_anything(r1: Any, first_run: dict[str, Any]) -> None:
    worse = 'metric = "pass@1", source = "evaluation", above = 1.5'
    level = 'metric = "format", source = "evaluation", not_below_stage = "base", points = 5'
    gate = f'name = "reasons", after = "reasoning_rl", conditions = [{{{worse}}}, {{{level}}}]'
    gate += ", evaluate = {problems = 6, samples_per_problem = 2, general = 4}"
    before = {path for path in r1.home.glob("artifacts/*/*")}
    # Without the gate this change would make sft_data and all that follows anew.
    code, result, said = attempt(r1, *gates(gate), "--set", "sft_data.keep_per_problem=1")
    assert code == 1 and [stage["name"] for stage in result["stages"]][-1] == "reasoning_rl"
    assert all(stage["status"] == "reused" for stage in result["stages"])
    assert said[-1].startswith("stopped: gate 'reasons' after reasoning_rl failed: pass@1 of dev2 is ")
    evidence = result["gates"][0]["evidence"]
    assert evidence[0].startswith("FAILED: pass@1 of dev2") and evidence[1].startswith("passed: format of dev2")
    assert "base" in evidence[1] and all(f"  {line}" in said for line in evidence)
    made = {path for path in r1.home.glob("artifacts/*/*")} - before
    assert [path.parent.name for path in made] == ["gate"]
    table = json.loads((next(iter(made)) / "1" / "table.json").read_text())
    assert set(table) == {"base", "dev2"} and (table["dev2"]["problems"], table["dev2"]["samples"]) == (6, 12)
    recorded = tags(r1, result["run_id"])
    assert recorded["r1flow.gate.reasons"] == "stopped"
    assert recorded["r1flow.gate.reasons.evidence"] == "; ".join(evidence)
    # The same again reuses the gate's samples.
    attempt(r1, *gates(gate), "--set", "sft_data.keep_per_problem=1")
    assert {path for path in r1.home.glob("artifacts/*/*")} - before == made


@pytest.mark.slow
def test_gates_that_hold_or_only_warn_let_the_recipe_run(r1: Any, first_run: dict[str, Any]) -> None:
    closing = 'metric = "pass@1", source = "table", stage = "alignment_rl", not_below_stage = "sft", points = 100'
    code, result, said = attempt(
        r1,
        *gates(
            after_problems(FEW),
            'name = "many", after = "problems", on_failure = "warn", conditions = [{' + MANY + "}]",
            'name = "closing", after = "evaluate", conditions = [{' + closing + "}]",
        ),
    )
    assert code == 0 and [stage["key"] for stage in result["stages"]] == [s["key"] for s in first_run["stages"]]
    assert {gate["name"]: gate["status"] for gate in result["gates"]} == {
        "enough": "passed", "many": "warned", "closing": "passed"
    }  # fmt: skip
    assert any(line.startswith("  FAILED: reasoning_train of problems is ") for line in said)
    assert result["gates"][2]["evidence"][0].startswith("passed: pass@1 of r1 is ")


@pytest.mark.slow
def test_asking_where_nobody_is_stops_with_the_command_that_goes_on(r1: Any) -> None:
    arguments = (*gates(after_problems(MANY, ', on_failure = "ask"')), "--only", "problems")
    code, result, said = attempt(r1, *arguments)
    assert code == 1 and said[-1].endswith("it needs approval, and nobody can be asked here")
    assert said[-2].startswith("to go on: r1 run tiny --set ") and said[-2].endswith(" --approve enough")
    code, result, _ = attempt(r1, *arguments, "--approve", "enough")
    assert code == 0 and result["gates"][0]["status"] == "approved"
    decision = json.loads(tags(r1, result["run_id"])["r1flow.gate.enough.decision"])
    assert decision["approved"] and decision["note"] == "--approve" and decision["when"] and decision["who"]
    # It stands: the same artifacts are not asked about again, other conditions are.
    code, result, _ = attempt(r1, *arguments)
    assert code == 0 and json.loads(tags(r1, result["run_id"])["r1flow.gate.enough.decision"]) == decision
    assert decision["evidence"] == tags(r1, result["run_id"])["r1flow.gate.enough.evidence_digest"]
    other = gates(after_problems(MANY.replace("1000000", "2000000"), ', on_failure = "ask"'))
    assert attempt(r1, *other, "--only", "problems")[0] == 1


@pytest.mark.parametrize(("answer", "code", "status"), [("y", 0, "approved"), ("n", 1, "refused")])
def test_a_terminal_is_asked(r1: Any, first_run: dict[str, Any], answer: str, code: int, status: str) -> None:
    condition = 'metric = "reasoning_train", below = ' + ("1" if answer == "y" else "2")
    sets = [part for value in SMALLER for part in ("--set", value)]
    command = r1.command("run", "tiny", *sets, "--only", "problems", "--json")
    command += gates(after_problems(condition, ', on_failure = "ask"'))
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\nfor a test\n".encode())
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, env=r1.environment(), timeout=300)
    os.close(ours), os.close(theirs)
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["gates"][0]["status"]) == (code, status), done.stderr[-2000:]
    recorded = json.loads(tags(r1, result["run_id"])["r1flow.gate.enough.decision"])
    assert (recorded["approved"], recorded["note"]) == (answer == "y", "for a test")
    if answer == "n":
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("stopped: gate 'enough' after problems was refused by ") and last.endswith("for a test")


@pytest.mark.parametrize(
    ("gate", "arguments", "said"),
    [
        (after_problems('metric = "reasoning_trian", above = 1'), (), "did you mean 'reasoning_train'?"),
        (after_problems(FEW), ("--approve", "enough"), "this gate does not ask"),
        (after_problems(FEW), ("--approve", "other"), "no such gate; there are enough"),
        (
            after_problems('metric = "x", not_below_stage = "sft"'),
            (),
            "looks at sft, which runs after the gate",
        ),
        (
            after_problems('metric = "x", source = "evaluation", above = 1', ", evaluate = {}"),
            (),
            "problems makes no checkpoint",
        ),
    ],
)
def test_what_is_wrong_with_a_gate_is_one_line(r1: Any, gate: str, arguments: tuple[str, ...], said: str) -> None:
    sets = [part for value in SMALLER for part in ("--set", value)]
    done = r1("run", "tiny", *sets, "--only", "problems", *gates(gate), *arguments)
    assert done.returncode == 2 and said in done.stderr.strip().splitlines()[-1], done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("error", "waits"), [(KeyboardInterrupt(), False), (Pause(), True)])
def test_a_run_waits_for_an_answer_only_if_it_can_go_on(
    error: BaseException, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a person stopped at the question would have kept its artifacts from `r1 prune` for a week."""
    recipe = load_recipe("tiny", [gates(after_problems(FEW, ', on_failure = "ask"'))[1]])
    record = Tracking(default_uri(tmp_path))
    run_id = record.recipe_run("tiny", "run", {}, {})
    made: Any = SimpleNamespace(key="0" * 64, counts={"reasoning_train": 1}, metrics={})

    def outcome(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Gatekeeper, "_outcome", outcome)
    keeper = Gatekeeper(recipe.gates, recipe, record, run_id, (), lambda stage: made, lambda row: None, run=None)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        keeper.after("problems")
    record.finish(run_id, "KILLED")
    found = record.reader.run(run_id)
    assert found is not None and found.status == ("WAITING" if waits else "KILLED")


def test_a_gate_about_a_stage_of_another_flow_is_left_alone() -> None:
    closing = 'metric = "pass@1", source = "table", stage = "alignment_rl", above = 0.5'
    gate = 'name = "closing", after = "evaluate", conditions = [{' + closing + "}]"
    recipe = load_recipe("tiny", [gates(gate)[1], "seed=1"])
    assert check_gates(recipe.gates, GRAPHS["r1_zero"](recipe), ()) == []
    assert check_gates(recipe.gates, GRAPHS["r1"](recipe), ()) == recipe.gates


def test_a_gate_about_a_row_of_another_flows_table_is_left_alone() -> None:
    """Distillation makes Dev1 too, but its table has only Dev2 and the students."""
    closing = 'metric = "pass@1", source = "table", stage = "cold_start_sft", above = 0.5'
    gate = 'name = "closing", after = "evaluate", conditions = [{' + closing + "}]"
    recipe = load_recipe("tiny", [gates(gate)[1]])
    assert check_gates(recipe.gates, GRAPHS["distill"](recipe), ()) == []
    assert check_gates(recipe.gates, GRAPHS["r1"](recipe), ()) == recipe.gates


def test_wrong_gates_in_a_recipe(tmp_path: Path) -> None:
    for gate, said in (
        (after_problems(FEW).replace('"problems"', '"problem"'), "unknown stage 'problem'"),
        (f"{after_problems(FEW)}}}, {{{after_problems(FEW)}", "two gates have the name 'enough'"),
        (after_problems("metric = 'x'"), "given: none"),
    ):
        with pytest.raises(InputError, match=said):
            load_recipe("tiny", [gates(gate)[1]])
