"""The check of gold answers: what passes, what is found, and what the command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pyarrow.parquet as pq
import pytest
import reasoning_gym

from grpo.data.records import Problem, write_rows
from grpo.rewards.reasoning_gym import pack_entry
from grpo.validate import FailedAnswer, main, validate


def problem(name: str, verifier: str, answer: str, metadata: dict[str, Any] | None = None) -> Problem:
    domain = "general" if verifier == "none" else "reasoning"
    return Problem(name, [{"role": "user", "content": "?"}], answer, verifier, domain, "en", "test", metadata or {})


DOUBLES = {"tests": [{"stdin": "3", "stdout": "6"}]}
ENTRY = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
GOOD = [
    problem("number", "number", "1,000"),
    problem("choice", "choice", "(B) 42 metres"),
    problem("math", "math", "\\frac{1}{2}"),
    problem("words", "math", "no such set exists!"),
    problem("exact", "exact", "Paris"),
    problem("code", "code", "print(2 * int(input()))", DOUBLES),
    problem("gym", "reasoning_gym", ENTRY["answer"], {"family": "chain_sum", "entry": pack_entry(ENTRY)}),
]
SKIPPED = [
    problem("poem", "none", ""),
    problem("no solution", "code", "", DOUBLES),
    problem("no gold", "reasoning_gym", "", {"family": "rubiks_cube", "entry": {}}),
]
BAD = {
    "five": (problem("five", "number", "five"), "the gold answer 'five' scores 0"),
    "maths": (problem("maths", "maths", "1"), "problem maths: unknown verifier 'maths'; known are .*"),
    "blank": (problem("blank", "exact", " "), "the gold answer ' ' scores 0"),
    "wrong": (problem("wrong", "code", "print(3)", DOUBLES), "the gold answer 'print\\(3\\)' scores 0"),
    "loop": (problem("loop", "code", "while True: print('x' * 1000)", DOUBLES), "code_output: .*"),
    "broken": (problem("broken", "math", "\\frac{1}{"), r"the gold answer '\\\\frac\{1\}\{' scores 0"),
    "no value": (problem("no value", "math", "1/0"), "the gold answer '1/0' scores 0"),
    "no entry": (problem("no entry", "reasoning_gym", "1"), "problem no entry: .* needs metadata\\['family'\\]"),
    "not text": (problem("not text", "reasoning_gym", "1", {"family": 5}), "problem not text: .*, text, not 5"),
    "raises": (
        problem("raises", "reasoning_gym", "1", {"family": "sudoku", "entry": {"answer": "1"}}),
        "error: KeyError: 'metadata'",
    ),
}


def test_gold_answers_that_earn_full_reward():
    done: list[int] = []
    assert validate([*GOOD, *SKIPPED], workers=2, time_limit_s=60, done=lambda: done.append(1)) == []
    assert len(done) == len(GOOD)
    assert validate([], workers=1, time_limit_s=60) == validate(SKIPPED, workers=1, time_limit_s=60) == []


def test_findings_come_in_the_order_of_the_problems():
    bad = [problem for problem, _ in BAD.values()]
    mixed = [p for pair in zip(bad, [*GOOD, *SKIPPED], strict=False) for p in pair]
    findings = validate(mixed, workers=2, time_limit_s=60)
    assert [(f.problem_id, f.verifier) for f in findings] == [(p.id, p.verifier) for p in bad]
    for finding in findings:
        assert re.fullmatch(BAD[finding.problem_id][1], finding.what), finding


def test_a_verifier_that_takes_too_long_is_a_finding():
    slow = problem("slow", "math", "9^{9^{9}}", {})
    findings = validate([GOOD[0], slow, GOOD[1]], workers=1, time_limit_s=1)
    assert findings == [FailedAnswer("slow", "math", "timeout: no result within 1 s")]


def test_a_program_has_as_long_as_its_tests_allow():
    slow = problem("slow", "code", "import time; time.sleep(1.5); print(2 * int(input()))", DOUBLES)
    assert validate([slow], workers=1, time_limit_s=1) == []


@pytest.mark.parametrize("gold", ["42!!", "9^{9^{9}}"])
def test_a_gold_answer_that_no_answer_can_be_compared_with_is_a_finding(gold: str) -> None:
    findings = validate([GOOD[2], problem("huge", "math", gold)], workers=1, time_limit_s=2)
    assert [(finding.problem_id, finding.what.split(":")[0]) for finding in findings] == [("huge", "timeout")]


def test_no_process_starts_without_anything_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.validate.Pool", None)
    assert validate([*SKIPPED]) == []


def test_more_problems_than_are_in_flight(monkeypatch):
    monkeypatch.setattr("grpo.validate.IN_FLIGHT", 3)
    numbers = [problem(str(i), "number", "x" if i % 4 == 0 else str(i)) for i in range(10)]
    assert validate(numbers, workers=2, time_limit_s=60) == [
        FailedAnswer(name, "number", "the gold answer 'x' scores 0") for name in ("0", "4", "8")
    ]


def test_the_command(tmp_path, capsys):
    write_rows(tmp_path / "good.parquet", [*GOOD, *SKIPPED], Problem)
    assert main([str(tmp_path / "good.parquet"), "--workers", "2", "--time-limit-s", "60"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["verifier", "checked", "failed", "skipped"],
        ["choice", "1", "0", "0"],
        ["code", "1", "0", "1"],
        ["exact", "1", "0", "0"],
        ["math", "2", "0", "0"],
        ["none", "0", "0", "1"],
        ["number", "1", "0", "0"],
        ["reasoning_gym", "1", "0", "1"],
    ]


def test_the_command_finds_and_counts(tmp_path):
    numbers = [problem(f"p{i}", "number", "x") for i in range(3)]
    write_rows(tmp_path / "bad.parquet", [GOOD[0], *numbers], Problem)
    command = [sys.executable, "-m", "grpo.validate", str(tmp_path), "--workers", "1", "--show", "2"]
    done = subprocess.run([*command, "--time-limit-s", "60"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "p0  number  the gold answer 'x' scores 0",
        "p1  number  the gold answer 'x' scores 0",
        "... and 1 more (--show)",
    ]
    assert lines[-1].split() == ["number", "4", "3", "0"]


@pytest.mark.parametrize("name", ["missing.parquet", "text.parquet", "metadata.parquet"])
def test_bad_input_is_one_line(tmp_path, capsys, name):
    (tmp_path / "text.parquet").write_text("no parquet")
    write_rows(tmp_path / "metadata.parquet", GOOD[:2], Problem)
    table = pq.read_table(tmp_path / "metadata.parquet")
    at = table.column_names.index("metadata")
    pq.write_table(table.set_column(at, "metadata", [["{}", "{not json"]]), tmp_path / "metadata.parquet")
    assert main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1
