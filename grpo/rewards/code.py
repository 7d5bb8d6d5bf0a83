"""Rewards for code: a program is correct if it passes its tests (R1, section 2.2: "code by running tests").

A test is ``{"stdin": text, "stdout": text}`` or ``{"assert": text}``. Programs run in `grpo.sandbox.run`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

from pydantic import Field, ValidationError

from grpo.errors import InputError
from grpo.processes.pool_worker import AnswerFailure
from grpo.sandbox.run import Limits, Result, run
from grpo.settings import Settings

LIMITS = Limits(wall_s=4.0, cpu_s=4)
TOTAL_S = 8.0
"""Seconds for all runs of a program, besides the starts of its sandboxes."""
START_S = 0.2
"""Seconds to start a sandbox, of which each "stdin" test has one of its own."""
MARGIN_S = 10.0
"""Seconds that an item's limit in `grpo.processes.pool` leaves beyond those for the runs, so that a slow program is
reported as such."""
_MOST_S = 300.0
"""Most seconds for all runs of a benchmark's program: a limit for each of its tests alone may allow an hour."""
_FENCE = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w+-]*)")
_PYTHON = ("python", "python3", "py")
_BROKEN = {
    "timeout": "ran out of time",
    "memory": "ran out of memory",
    "processes": "started too many processes or threads",
    "output": "printed too much",
    "disk": "wrote too much",
    "crash": "was ended by a signal",
}

# The harness saves what it needs before the program runs. The token comes with the input, which is then closed, so that
# neither the program's file, nor a redefined name, nor an early exit reveals it. The assertions come with it: those of
# a benchmark may be larger than the disk. If each has a limit, the kernel ends the program after that much CPU time,
# unless it ignores the signal. What stands under `if __name__ == "__main__"` does not run: it may read input, or exit.
_HARNESS = """\
def _harness(os, resource, spent_ns, modules, compile, exec, min, space):
    write, end, pieces = os.write, os._exit, []
    while piece := os.read(0, 1 << 20):
        pieces.append(piece)
    token, *assertions = b"".join(pieces).split(b"\\0")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limit, cpu, most_s = resource.setrlimit, resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU)[1]
    parts = [("prelude", {prelude!r}), ("program.py", {program!r})] + [("assertions", text) for text in assertions]
    del space["_harness"]
    space["__name__"] = "program"
    modules["program"] = modules["__main__"]
    for name, text in parts:
        if {each_s}:
            last_s = min(spent_ns() // 10**9 + {each_s}, most_s)
            limit(cpu, (last_s, most_s))
        exec(compile(text, name, "exec", dont_inherit=True), space)
        if {each_s} and spent_ns() > (last_s + 1) * 10**9:
            end(1)
    write(1, token)
_harness(
    __import__("os"), __import__("resource"), __import__("time").process_time_ns, __import__("sys").modules, compile,
    exec, min, globals()
)
"""
# The program keeps its line numbers, and `from __future__` at its beginning.
_AFTER_PRELUDE = """\
def _start(compile, exec, space):
    del space["_start"]
    exec(compile({prelude!r}, "prelude", "exec", dont_inherit=True), space)
    exec(compile({program!r}, "program.py", "exec", dont_inherit=True), space)
_start(compile, exec, globals())
"""


class Grading(Settings):
    """How a benchmark grades programs, if not as `passes` does: ``metadata["code_grading"]`` of its problems."""

    prelude: str = Field("", description="Runs before each program, in its namespace: the benchmark's imports.")
    test_s: float | None = Field(
        None, gt=0, le=60, description="Seconds of CPU time for each test, instead of `LIMITS` and `TOTAL_S`."
    )
    numbers: bool = Field(
        False,
        description="Lines of output are equal if their words are equal numbers (1.0 and 1), and white space around "
        "lines and blank lines around the output do not count.",
    )

    def total_s(self, tests: int) -> float | None:
        """Seconds for so many tests together; None if the benchmark does not say."""
        return None if self.test_s is None else min(tests * _wall_s(self.test_s), _MOST_S)


USUAL = Grading()


def read_grading(metadata: dict[str, Any]) -> Grading:
    """How programs for a problem with this metadata are graded. Raises InputError if it cannot be read."""
    try:
        return Grading.model_validate(metadata.get("code_grading") or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in ("code_grading", *first["loc"]))
        raise InputError(f"{place}: {first['msg']}") from None


def passes(
    program: str,
    tests: list[dict[str, str]],
    limits: Limits = LIMITS,
    total_s: float = TOTAL_S,
    grading: Grading = USUAL,
) -> float:
    """1.0 if `program`, or the last fenced block in it, passes every test, else 0.0.

    `limits` apply to each run: one run per "stdin" test and one for all assertions. `total_s` applies to all runs
    together, besides the starts of sandboxes. Times of a `grading` replace both. Raises AnswerFailure (kind "code_" and
    the limit) if a run breaks a limit, and InputError if the tests are malformed.
    """
    check(tests)
    tests = [_given(test) for test in tests]
    total_s = grading.total_s(len(tests)) or total_s
    deadline = time.monotonic() + total_s
    program = extract(program)
    assertions = [test["assert"] for test in tests if "assert" in test]
    if assertions:
        together = limits if grading.test_s is None else replace(limits, wall_s=total_s, cpu_s=total_s)
        if not _asserts(program, assertions, _within(together, deadline), grading):
            return 0.0
    if grading.test_s is not None:
        limits = replace(limits, wall_s=_wall_s(grading.test_s), cpu_s=_cpu_s(grading.test_s))
    if grading.prelude:
        program = _AFTER_PRELUDE.format(prelude=grading.prelude, program=program)
    same = _same_numbers if grading.numbers else _same_lines
    for test in tests:
        if "stdin" in test:
            deadline += START_S
            result = _judged(run(program, test["stdin"], _within(limits, deadline)))
            if result.kind != "ok" or not same(result.stdout, test["stdout"]):
                return 0.0
    return 1.0


def _wall_s(test_s: float) -> float:
    """Twice as much by the clock, since programs share the processors with whatever else runs."""
    return 2 * test_s


def _cpu_s(test_s: float) -> int:
    """Whole seconds, as the kernel counts, and one for the start of the interpreter and its imports."""
    return math.ceil(test_s) + 1


def check(tests: Any) -> None:
    """Raises InputError unless `tests` is a list of at least one well-formed test."""
    if not isinstance(tests, list) or not tests:
        raise InputError(f"code tests: a list of at least one test is needed, got {json.dumps(tests, default=repr)}")
    asserted: list[ast.stmt] = []
    for i, test in enumerate(tests):
        given = _given(test) if isinstance(test, dict) else {}
        well_formed = given.keys() in ({"stdin", "stdout"}, {"assert"})
        if not well_formed or not all(isinstance(text, str) for text in given.values()):
            raise InputError(
                f'code tests: test {i} must be {{"stdin": text, "stdout": text}} or {{"assert": text}}, '
                f"got {json.dumps(test, default=repr)[:200]}"
            )
        if "assert" in given:
            try:
                statements = ast.parse(given["assert"]).body
            except (SyntaxError, ValueError) as error:
                raise InputError(f"code tests: test {i} is not Python: {error}") from None
            except (MemoryError, RecursionError):  # how Python's parser says so
                raise InputError(f"code tests: test {i} is nested too deeply") from None
            if not statements:
                raise InputError(f"code tests: test {i} asserts nothing")
            asserted += statements
    if asserted and not any(map(_may_fail, asserted)):
        raise InputError(
            "code tests: they only define what would test a program; add a call, such as check(NAME OF THE FUNCTION)"
        )


def _given(test: dict[str, Any]) -> dict[str, Any]:
    """A test without empty columns: parquet fills what a test lacks with null."""
    return {name: text for name, text in test.items() if text is not None}


def _may_fail(node: ast.AST) -> bool:
    """Whether a statement asserts or calls something when it runs: a definition only does so when it is called."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    return isinstance(node, ast.Assert | ast.Call | ast.Raise) or any(map(_may_fail, ast.iter_child_nodes(node)))


def extract(answer: str) -> str:
    """The program in an answer: its last block fenced as Python, else its last fenced block, else all of it."""
    blocks = _fenced(answer)
    python = [text for language, text in blocks if language in _PYTHON]
    return (python or [text for _, text in blocks] or [answer])[-1]


def _fenced(answer: str) -> list[tuple[str, str]]:
    """Language and text of each closed Markdown fence. Only the same fence marks, alone on a line, close it."""
    blocks: list[tuple[str, str]] = []
    mark, language, lines = "", "", list[str]()
    for line in answer.splitlines(keepends=True):
        if mark:
            if line.strip() == mark:
                blocks.append((language, "".join(lines)))
                mark = ""
            else:
                lines.append(line)
        elif match := _FENCE.match(line):
            mark, language, lines = match[1], match[2].lower(), []
    return blocks


def _asserts(program: str, assertions: list[str], limits: Limits, grading: Grading) -> bool:
    """Whether the program and then all assertions run to their end, in one interpreter.

    The token is printed after the last assertion, and a program that exits early does not know it.
    """
    token = secrets.token_hex(16)
    each_s = _cpu_s(grading.test_s) if grading.test_s is not None else 0
    parts = assertions if each_s else ["\n".join(assertions)]
    harness = _HARNESS.format(prelude=grading.prelude, program=program, each_s=each_s)
    result = _judged(run(harness, "\0".join([token, *parts]), limits))
    return result.kind == "ok" and token in result.stdout


def _within(limits: Limits, deadline: float) -> Limits:
    left = deadline - time.monotonic()
    if left <= 0:
        raise AnswerFailure("code_timeout", "the program ran out of time over all its tests")
    return replace(limits, wall_s=min(limits.wall_s, left))


def _judged(result: Result) -> Result:
    if result.kind in _BROKEN:
        raise AnswerFailure(f"code_{result.kind}", f"the program {_BROKEN[result.kind]}")
    return result


def _same_lines(printed: str, expected: str) -> bool:
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    """Lines without trailing white space and without blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_numbers(printed: str, expected: str) -> bool:
    """Whether each line is the same text, or the same numbers, exactly: 0.5 is .50, and not 0.5000001."""
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (printed, expected)]
    return len(lines[0]) == len(lines[1]) and all(
        one == other or _equal_numbers(one, other) for one, other in zip(*lines, strict=True)
    )


def _equal_numbers(one: str, other: str) -> bool:
    try:
        return [Decimal(word) for word in one.split()] == [Decimal(word) for word in other.split()]
    except ArithmeticError:  # a word that is no number
        return False
