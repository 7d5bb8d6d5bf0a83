"""Code is right if it passes its tests; a program that breaks a limit is counted, one that cheats cheaply fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo.errors import InputError
from grpo.processes.pool import AnswerFailure, Failure, Pool
from grpo.rewards.code import extract, passes
from grpo.sandbox.run import Limits

LIMITS = Limits(wall_s=20.0, cpu_s=15, memory_bytes=400 << 20, processes=16, disk_bytes=4 << 20, output_bytes=50_000)
DOUBLE = [{"assert": "assert double(2) == 4"}, {"assert": "assert double(-3) == -6\nassert double(0) == 0"}]
SUM = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]
RIGHT = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("program", "tests", "score"),
    [
        ("print(sum(map(int, input().split())))", SUM, 1.0),
        ("print(3)", SUM, 0.0),
        ("print(sum(map(int, input().split())), end='  \\n\\n \\n')", SUM, 1.0),
        ("print(); print(sum(map(int, input().split())))", SUM, 0.0),
        ("print(sum(map(int, input().split()))); raise SystemExit(1)", SUM, 0.0),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", SUM, 1.0),
        ("exit(print(sum(map(int, input().split()))))", SUM, 1.0),
        ("print(sum(map(int, input().split()))", SUM, 0.0),  # a parenthesis is missing
        ("import sys\nprint(sys.stdin.read()[::-1])", [{"stdin": "äß😀\nb", "stdout": "b\n😀ßä"}], 1.0),
        (RIGHT, DOUBLE, 1.0),
        ("double = lambda x: x * x", DOUBLE, 0.0),
        ("def double(x): return x.y", DOUBLE, 0.0),
        (RIGHT + "print('noise without a line end', end='')", DOUBLE, 1.0),
        ("from __future__ import annotations\n" + RIGHT, DOUBLE, 1.0),
        (RIGHT + "def main(): print(double(int(input())))", [*DOUBLE, {"stdin": "4", "stdout": ""}], 1.0),
        (RIGHT + "print(double(4))", [*DOUBLE, {"stdin": "", "stdout": "8"}], 1.0),
    ],
)
def test_a_program_scores_one_if_it_passes_every_test(program: str, tests: list[dict[str, str]], score: float) -> None:
    assert passes(program, tests, LIMITS) == score


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import atexit, os; atexit.register(lambda: os._exit(0)); raise ValueError",
        "import os\ndef double(x): os._exit(0)",
        "import sys; sys.excepthook = lambda *_: None",
        "import sys; print(open(sys.argv[0]).read()); sys.exit()",
        "import sys; print(sys.stdin.read()); sys.exit()",
        "import os; os.lseek(0, 0, 0); print(os.read(0, 1000)); os._exit(0)",
        "import builtins; builtins.exec = builtins.compile = lambda *_, **__: None",
        "import os\nif os.fork(): os._exit(0)\nprint(open('/proc/self/environ').read())",
    ],
)
def test_a_cheap_cheat_does_not_pass_assertions(program: str) -> None:
    assert passes(program, DOUBLE, LIMITS) == 0.0


@pytest.mark.parametrize(
    ("program", "limits", "kind"),
    [
        ("while True: pass", replace(LIMITS, wall_s=0.5), "code_timeout"),
        ("while True: pass", replace(LIMITS, cpu_s=1), "code_timeout"),
        ("x = bytearray(1 << 30)", LIMITS, "code_memory"),
        ("import os\nwhile True: os.fork()", LIMITS, "code_processes"),
        ("while True: print(1)", LIMITS, "code_output"),
        ("open('x', 'wb').write(bytes(8 << 20))", LIMITS, "code_disk"),
        ("import os; os.abort()", LIMITS, "code_crash"),
    ],
)
@pytest.mark.parametrize("tests", [DOUBLE, SUM], ids=["assertions", "stdin"])
def test_a_program_that_breaks_a_limit_is_a_failure_of_the_answer(program, limits, kind, tests) -> None:
    with pytest.raises(AnswerFailure) as caught:
        passes(program, tests, limits)
    assert caught.value.kind == kind
    assert caught.value.message.startswith("the program ") and "\n" not in caught.value.message


def test_time_for_all_tests_together_is_limited_too() -> None:
    tests = [{"stdin": "", "stdout": ""}] * 1_000
    with pytest.raises(AnswerFailure) as caught:  # 1,000 x 0.3 s are more than 2 s
        passes("import time; time.sleep(0.3)", tests, LIMITS, total_s=2.0)
    assert caught.value.kind == "code_timeout"


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([], "at least one test"),
        ("assert f(1)", "at least one test"),
        ([{"stdin": "1"}], "test 0 must be"),
        ([{"assert": "assert 1"}, {"assert": "assert 1", "stdin": ""}], "test 1 must be"),
        ([{"stdin": "1", "stdout": 1}], "test 0 must be"),
        (["assert 1"], "test 0 must be"),
        ([{"assert": "assert f(1) = 2"}], "test 0 is not Python"),
        ([{"assert": "-" * 100_000 + "1"}], "test 0 is nested too deeply"),
        ([{"assert": "1+" * 100_000 + "1"}], "test 0 is nested too deeply"),
        ([{"assert": "# later"}], "test 0 asserts nothing"),
    ],
)
def test_malformed_tests_are_the_users_mistake(tests, words: str) -> None:
    with pytest.raises(InputError, match=words):
        passes(RIGHT, tests, LIMITS)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = '''\n````\n'''\n```", "x = '''\n````\n'''\n"),
        ("~~~Python3\nx = 1\n~~~\r\n", "x = 1\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_last_python_fence_is_the_program(answer: str, program: str) -> None:
    assert extract(answer) == program


def test_in_a_pool_a_hanging_program_is_the_answers_failure_and_a_wrong_one_a_zero() -> None:
    short = replace(LIMITS, wall_s=0.5)
    programs = {"while True: pass": short, "print(3)": LIMITS, "print(sum(map(int, input().split())))": LIMITS}
    with Pool(2, 60.0, 1 << 30) as pool:
        hanging, wrong, right = [pool.submit(passes, p, SUM, limits).result(60) for p, limits in programs.items()]
    assert hanging == Failure("code_timeout", "the program ran out of time", True)
    assert (wrong, right) == (0.0, 1.0)
