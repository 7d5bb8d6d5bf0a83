"""Code is right if it passes its tests; a program that breaks a limit is counted, one that cheats cheaply fails."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from grpo.errors import InputError
from grpo.processes.pool import AnswerFailure, Failure, Pool
from grpo.rewards import code
from grpo.rewards.code import Grading, extract, passes, read_grading
from grpo.sandbox.run import Limits

LIMITS = Limits(wall_s=20.0, cpu_s=15, memory_bytes=400 << 20, processes=16, disk_bytes=4 << 20, output_bytes=50_000)
DOUBLE = [{"assert": "assert double(2) == 4"}, {"assert": "assert double(-3) == -6\nassert double(0) == 0"}]
SUM = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]
TWICE = {"stdin": "4", "stdout": "8"}
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
        (RIGHT + "if __name__ == '__main__':\n    print(double(int(input())))", [*DOUBLE, TWICE], 1.0),
        (RIGHT + "if __name__ == '__main__':\n    import unittest; unittest.main()", DOUBLE, 1.0),
        ("import pickle\nclass A: pass\npickle.loads(pickle.dumps(A()))\n" + RIGHT, DOUBLE, 1.0),
        (RIGHT, [{**test, "stdin": None, "stdout": None} for test in DOUBLE], 1.0),  # as parquet stores them
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


def test_the_starts_of_sandboxes_are_not_a_programs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "START_S", 5.0)
    tests = [{"stdin": "", "stdout": "1"}] * 5
    assert passes("print(1)", tests, LIMITS, total_s=0.001) == 1.0


def test_several_asserts_may_stand_in_a_function_that_another_test_calls() -> None:
    tests = [{"assert": "def check(candidate):\n    assert candidate(1) == 2"}, {"assert": "check(double)"}]
    assert passes(RIGHT, tests, LIMITS) == 1.0
    assert passes("def double(x): return x", tests, LIMITS) == 0.0


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
        (
            [{"assert": "def check(candidate):\n    assert candidate(1) == 2"}],
            r"only define .*; add a call, such as check",
        ),
        ([{"assert": "1"}, {"assert": "f = lambda: g(1)"}], "only define"),
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


def test_a_prelude_runs_before_the_program_and_moves_none_of_its_lines() -> None:
    imports = Grading(prelude="from math import *\nimport math\n")
    line = "import sys\nprint(sys._getframe().f_lineno)"
    assert passes(line, [{"stdin": "", "stdout": "2"}], LIMITS, grading=imports) == 1.0
    future = "from __future__ import annotations\ndef root(x: Never) -> Never:\n    return sqrt(x)\n"
    tests = [{"assert": "assert root(4) == 2"}, {"assert": "assert math.pi > 3"}]
    assert [passes(future, tests, LIMITS, grading=g) for g in (imports, Grading())] == [1.0, 0.0]
    assert passes("raise SystemExit(_start)", [{"stdin": "", "stdout": ""}], LIMITS, grading=imports) == 0.0


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1.0 2", "1 2.00", True),
        ("\n\n  1 \n2\n\n", "1\n2", True),
        ("yes", "YES", False),
        ("1 a", "1.0 a", False),  # only lines that are all numbers
        ("1\n\n2", "1\n2", False),
        ("50000000000000000", "50000000000000001", False),
    ],
)
def test_output_may_be_compared_as_numbers(printed: str, expected: str, same: bool) -> None:
    test = [{"stdin": "", "stdout": expected}]
    assert passes(f"print({printed!r})", test, LIMITS, grading=Grading(numbers=True)) == same


@pytest.mark.parametrize(
    ("program", "tests"),
    [("while True: pass", SUM), ("while True: pass", DOUBLE), ("def double(x):\n    while True: pass", DOUBLE)],
)
def test_each_test_of_a_benchmark_has_a_limit_of_processor_time(program: str, tests: list[dict[str, str]]) -> None:
    started = time.monotonic()
    with pytest.raises(AnswerFailure) as caught:
        passes(program, tests * 100, grading=Grading(test_s=0.5))  # all together may take 200 s
    assert caught.value.kind == "code_timeout" and time.monotonic() - started < 60


def test_a_program_that_ignores_the_kernels_signal_still_has_no_more_time() -> None:
    slow = "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef double(x):\n"
    slow += "    end = time.process_time() + (4 if x == 2 else 0)\n    while time.process_time() < end: pass\n"
    slow += "    return 2 * x"
    assert passes(slow, DOUBLE * 4, grading=Grading(test_s=1.0)) == 0.0


@pytest.mark.parametrize(("program", "tests"), [("print(sum(map(int, input().split())))", SUM), (RIGHT, DOUBLE)])
def test_times_of_a_benchmark_replace_the_usual_ones(program: str, tests: list[dict[str, str]]) -> None:
    slow = f"import time\ntime.sleep(0.5)\n{program}"
    assert passes(slow, tests, replace(LIMITS, wall_s=0.1), total_s=0.1, grading=Grading(test_s=10.0)) == 1.0


def test_a_grading_that_cannot_be_read_is_one_line() -> None:
    assert read_grading({}) == read_grading({"code_grading": None}) == Grading()
    with pytest.raises(InputError, match=r"^code_grading\.test_s: Input should be greater than 0$"):
        read_grading({"code_grading": {"test_s": 0}})
