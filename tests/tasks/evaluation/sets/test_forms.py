"""Programs for LiveCodeBench's problems, which are graded as by its own runner."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from grpo.data.records import Problem
from grpo.rewards.verifiers import time_limit_s, verify
from tasks.evaluation.sets.load import load_set
from tasks.evaluation.sets.settings import SetData

STARTER = "class Solution:\n    def ends(self, numbers: List[int]) -> Optional[List[int]]:\n"


def from_tests(folder: Path, kind: str, *tests: tuple[str, str]) -> Problem:
    listed = [{"input": given, "output": expected, "testtype": kind} for given, expected in tests]
    row: dict[str, Any] = {"question_content": "q", "public_test_cases": json.dumps(listed)}
    if kind == "functional":
        row |= {"starter_code": STARTER, "metadata": json.dumps({"func_name": "ends"})}
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (problem,) = load_set(SetData(name="livecodebench", path=str(path)), 0).problems
    return problem


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return [numbers[0], numbers[-1]]", 1.0),
        ("return numbers[0], numbers[-1]", 1.0),  # a tuple where a list is expected
        ("counts = Counter(numbers); return list(accumulate(numbers))[:1] + [heappop(sorted(counts))][:0] + [3]", 1.0),
        ("return [math.floor(numbers[0] + 0.5), collections.deque(numbers)[-1]]", 1.0),
        ("return {numbers[0], numbers[-1]}", 0.0),
        ("return numbers[-1], numbers[0]", 0.0),
    ],
)
def test_the_starter_code_needs_no_imports_of_its_own(tmp_path: Path, body: str, score: float) -> None:
    problem = from_tests(tmp_path, "functional", ("[1, 2, 3]", "[1, 3]"), ("[1, 3]", "[1, 3]"))
    assert verify(problem, STARTER + f"        {body}\n") == score
    assert verify(problem, "from __future__ import annotations\n" + STARTER + f"        {body}\n") == score


def test_large_tests_neither_fill_the_disk_nor_the_memory(tmp_path: Path) -> None:
    numbers = json.dumps([*range(1, 100_001)] * 2)  # 1.4 MB each
    problem = from_tests(tmp_path, "functional", *[(numbers, "[1, 100000]")] * 15)
    assert verify(problem, STARTER + "        return [numbers[0], numbers[-1]]\n") == 1.0


@pytest.mark.parametrize(
    ("program", "score"),
    [
        ("print(sum(map(int, stdin.read().split())) / 2)", 1.0),
        ("from __future__ import annotations\nprint(datetime.timedelta(seconds=1.5).total_seconds(), end='00')", 1.0),
        ("if __name__ == '__main__':\n    print('\\n  1.5\\n\\n')", 1.0),
        ("print(1.500001)", 0.0),
        ("print(open)", 0.0),
        ("print('1.5 1.5')", 0.0),
        ("print('sNaN')", 0.0),
    ],
)
def test_what_a_program_prints_is_compared_as_numbers(tmp_path: Path, program: str, score: float) -> None:
    assert verify(from_tests(tmp_path, "stdin", ("1 2\n", "1.5\n")), program) == score


def test_every_test_has_its_time(tmp_path: Path) -> None:
    """Other programs have 4 s for each test and 8 s for all, and the pool ends them after 10 s."""
    problem = from_tests(tmp_path, "stdin", *((f"{n}\n", f"{n + 1}\n") for n in range(60)))
    assert problem.metadata["code_grading"]["test_s"] == 6.0
    assert 240 < time_limit_s(problem) < 3_600
    slow = "n = int(input())\ntime.sleep(4.2 if n == 0 else 0)\nprint(n + 1)"
    first = dataclasses.replace(problem, metadata={**problem.metadata, "tests": problem.metadata["tests"][:2]})
    assert verify(first, f"import time\n{slow}") == 1.0
