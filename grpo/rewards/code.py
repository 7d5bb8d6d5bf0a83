"""Rewards for code: a program is correct if it passes its tests (R1, section 2.2: "code by running tests").

A test is ``{"stdin": text, "stdout": text}`` or ``{"assert": text}``. Programs run in `grpo.sandbox.run`.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import time
from dataclasses import replace
from typing import Any

from grpo.errors import InputError
from grpo.processes.pool_worker import AnswerFailure
from grpo.sandbox.run import Limits, Result, run

LIMITS = Limits(wall_s=4.0, cpu_s=4)
TOTAL_S = 8.0
"""Seconds for all runs of a program: less than the item's limit in `grpo.processes.pool`, so that a slow program is
reported as such."""
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
# neither the program's file, nor a redefined name, nor an early exit reveals it.
_HARNESS = """\
def _harness(os, compile, exec, space):
    write, token = os.write, os.read(0, {length})
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    del space["_harness"]
    exec(compile({program!r}, "program.py", "exec", dont_inherit=True), space)
    exec(compile({assertions!r}, "assertions", "exec", dont_inherit=True), space)
    write(1, token)
_harness(__import__("os"), compile, exec, globals())
"""


def passes(program: str, tests: list[dict[str, str]], limits: Limits = LIMITS, total_s: float = TOTAL_S) -> float:
    """1.0 if `program`, or the last fenced block in it, passes every test, else 0.0.

    `limits` apply to each run: one run per "stdin" test and one for all assertions. `total_s` applies to all runs
    together. Raises AnswerFailure (kind "code_" and the limit) if a run breaks a limit, and InputError if the tests are
    malformed.
    """
    check(tests)
    deadline = time.monotonic() + total_s
    program = extract(program)
    assertions = [test["assert"] for test in tests if "assert" in test]
    if assertions and not _asserts(program, assertions, _within(limits, deadline)):
        return 0.0
    for test in tests:
        if "stdin" in test:
            result = _judged(run(program, test["stdin"], _within(limits, deadline)))
            if result.kind != "ok" or _lines(result.stdout) != _lines(test["stdout"]):
                return 0.0
    return 1.0


def check(tests: Any) -> None:
    """Raises InputError unless `tests` is a list of at least one well-formed test."""
    if not isinstance(tests, list) or not tests:
        raise InputError(f"code tests: a list of at least one test is needed, got {json.dumps(tests, default=repr)}")
    for i, test in enumerate(tests):
        keys = set(test) if isinstance(test, dict) else None
        if keys not in ({"stdin", "stdout"}, {"assert"}) or not all(isinstance(text, str) for text in test.values()):
            raise InputError(
                f'code tests: test {i} must be {{"stdin": text, "stdout": text}} or {{"assert": text}}, '
                f"got {json.dumps(test, default=repr)[:200]}"
            )
        if "assert" in test:
            try:
                statements = ast.parse(test["assert"]).body
            except (SyntaxError, ValueError) as error:
                raise InputError(f"code tests: test {i} is not Python: {error}") from None
            except (MemoryError, RecursionError):  # how Python's parser says so
                raise InputError(f"code tests: test {i} is nested too deeply") from None
            if not statements:
                raise InputError(f"code tests: test {i} asserts nothing")


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


def _asserts(program: str, assertions: list[str], limits: Limits) -> bool:
    """Whether the program and then all assertions run to their end, in one interpreter.

    The token is printed after the last assertion, and a program that exits early does not know it.
    """
    token = secrets.token_hex(16)
    harness = _HARNESS.format(length=len(token), program=program, assertions="\n".join(assertions))
    result = _judged(run(harness, token, limits))
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


def _lines(text: str) -> list[str]:
    """Lines without trailing white space and without blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
