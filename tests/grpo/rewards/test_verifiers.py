"""Each verifier on cases that can be checked by hand, and every gold answer on its own problem."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.processes.pool import AnswerFailure
from grpo.rewards.verifiers import VERIFIERS, agree, verify


def problem(verifier: str, answer: str, metadata: dict[str, Any] | None = None) -> Problem:
    messages = [{"role": "user", "content": "question"}]
    return Problem("p1", messages, answer, verifier, "reasoning", "en", "test", metadata or {})


RIGHT = [
    ("exact", "Paris", "  paris "),
    ("exact", "New  York", "new york."),
    ("exact", "ﬁne", "fine"),
    ("number", "42", "The result is 42"),
    ("number", "1000", "1 000"),
    ("math", "42", "The result is 42"),
    ("math", "42", "x = 6 \\cdot 7 = 42"),
    ("math", "0.42", "42\\%"),
    ("math", "\\{1,2\\}", "x = 1, 2"),
    ("choice", "B", "The answer is B, not A"),
    ("choice", "B", "I would choose option B"),
    ("choice", "B", "B) It does not change"),
    ("choice", "A", "The answer is A."),
    ("number", "1000", "1,000"),
    ("number", "5", "$5"),
    ("number", "5", "\\$5.00"),
    ("number", "3.5", "3.50"),
    ("number", "3.5", "7/2"),
    ("number", "0.5", "50%"),
    ("number", "-2", "\u22122"),
    ("number", "0.75", "\\frac{3}{4}"),
    ("number", "277", "\\boxed{277}"),
    ("number", "1200", "1.2e3"),
    ("number", "0.5", ".5"),
    ("number", "5", "5."),
    ("number", "0.1", "0.10"),
    ("math", "\\frac{1}{2}", "0.5"),
    ("math", "x^2+1", "1+x^2"),
    ("math", "\\sqrt{8}", "2\\sqrt{2}"),
    ("math", "\\{1,2\\}", "\\{2,1\\}"),
    ("math", "$x=5$", "5"),
    ("math", "5", "\\boxed{5}"),
    ("math", "1,000", "1000"),
    ("math", "no such set exists", "No such set exists."),
    ("choice", "B", "b"),
    ("choice", "B", "(B)"),
    ("choice", "B", "B."),
    ("choice", "B", "B) 42 metres"),
    ("choice", "(B) 42 metres", "\\boxed{B}"),
    ("choice", "B", "\\boxed{\\text{(B)}}"),
    ("choice", "B", "**B**"),
    ("choice", "B", "The answer is B"),
]

WRONG = [
    ("exact", "Paris", "Paris, France"),
    ("exact", "...", "..."),
    ("exact", "42", "4²"),
    ("number", "42", "4 2"),
    ("number", "42", "7 = 42"),
    ("number", "42", "42%"),
    ("number", "42", "41\n42"),
    ("math", "42", "\\neq 42"),
    ("math", "42", "7 = 42"),
    ("math", "42", "42\\%"),
    ("math", "42", "$41$ or $42$"),
    ("math", "42", "42, 43"),
    ("math", "42", "4²"),
    ("math", "y = 2x", "x = 2x"),
    ("math", "42", "(" * 100_000),
    ("choice", "A", "The answer is a banana"),
    ("choice", "A", "The answer is A banana"),
    ("choice", "B", "I would not choose option B"),
    ("choice", "A", "(A) is not the answer"),
    ("number", "1000", "1,00"),
    ("number", "5", "5 or 6"),
    ("number", "5", "five"),
    ("number", "0.3333", "1/3"),
    ("number", "1", "1/0"),
    ("number", "1", "1e999999999"),
    ("number", "1", "1" * 100_000),
    ("number", "five", "five"),
    ("math", "3", "3\\pi"),
    ("math", "7", "7 or 8"),
    ("math", "(1,2)", "(2,1)"),
    ("math", "\\frac{1}{2}", "\\frac{1}{"),
    ("choice", "B", "A or B"),
    ("choice", "B", "C"),
    ("choice", "I", "I think it is B"),
    ("choice", "A", "A cat"),
    ("choice", "B", "the answer is A, no, the answer is B"),
]


@pytest.mark.parametrize(("verifier", "gold", "answer"), RIGHT)
def test_right(verifier: str, gold: str, answer: str) -> None:
    assert verify(problem(verifier, gold), answer) == 1.0


@pytest.mark.parametrize(("verifier", "gold", "answer"), WRONG)
def test_wrong(verifier: str, gold: str, answer: str) -> None:
    assert verify(problem(verifier, gold), answer) == 0.0


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("answer", [None, "", " \n\t"])
def test_no_answer_scores_nothing(verifier: str, answer: str | None) -> None:
    assert verify(problem(verifier, "1"), answer) == 0.0


def test_math_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(verify(problem("math", "\\frac{1}{4}"), "0.25")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_what_has_no_value_is_wrong_and_other_errors_of_math_are_raised() -> None:
    assert verify(problem("math", "5"), "\\frac{1}{0}") == 0.0
    assert (
        verify(problem("math", "$x=2$ or $x=3$"), "1,0001,000\\infty") == 0.0
    )  # a set with 0 * oo, which is no number
    # math-verify 0.9 knows no order between these two kinds of relation; that says nothing of the answer.
    with pytest.raises(KeyError):
        verify(problem("math", "x \\neq 3"), "x > 3")


@pytest.mark.parametrize(
    ("verifier", "one", "other", "same"),
    [
        ("number", "1,000", "1000.0", True),
        ("number", "7", "8", False),
        ("math", "\\frac{1}{2}", "0.5", True),
        ("choice", "(B)", "the answer is B", True),
        ("exact", "Paris.", "paris", True),
        ("exact", "1,000", "1000", False),  # the rule compares text
        ("reasoning_gym", "7.0", "7", True),  # its scorer knows the gold answer only: by value
        ("reasoning_gym", "A B", "a  b", True),  # or by text
        ("reasoning_gym", "A B", "B A", False),
        ("code", "7", "8", False),
    ],
)
def test_two_answers_agree_by_the_problems_rule(verifier: str, one: str, other: str, same: bool) -> None:
    for gold in (one, other, "something else"):
        assert agree(problem(verifier, gold), one, other) is same


DOUBLE = "x = int(input())\nprint(2 * x)"
DOUBLES = {"tests": [{"stdin": "3", "stdout": "6"}, {"stdin": "-1", "stdout": "-2"}]}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (DOUBLE, 1.0),
        (f"So:\n```python\n{DOUBLE}\n```\nIt doubles.", 1.0),
        ("print(6)", 0.0),  # right for the first test only
        ("print(", 0.0),
    ],
)
def test_code_is_right_if_it_passes_all_tests(answer: str, score: float) -> None:
    assert verify(problem("code", DOUBLE, DOUBLES), answer) == score


def test_a_program_that_breaks_a_limit_is_counted_as_such() -> None:
    with pytest.raises(AnswerFailure) as failure:
        verify(problem("code", DOUBLE, DOUBLES), "while True: print('x' * 1000)")
    assert failure.value.kind == "code_output"


@pytest.mark.parametrize("metadata", [{}, {"tests": []}, {"tests": [{"input": "1"}]}])
def test_code_needs_tests(metadata: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="problem p1, metadata\\['tests'\\]: code tests: "):
        verify(problem("code", DOUBLE, metadata), DOUBLE)


def test_unknown_verifier_names_the_known() -> None:
    with pytest.raises(InputError, match="unknown verifier 'maths'; known are exact, number, math, choice"):
        verify(problem("maths", "1"), "1")


def test_general_prompts_have_no_rule() -> None:
    with pytest.raises(InputError, match="no verifier"):
        verify(problem("none", ""), "hello")
