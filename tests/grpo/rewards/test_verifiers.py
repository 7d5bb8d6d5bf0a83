"""Each verifier on cases that can be checked by hand, and every gold answer on its own problem."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.processes.pool import AnswerFailure
from grpo.rewards.verifiers import VERIFIERS, agree, may_take_long, verify, verify_gold


def problem(verifier: str, answer: str, metadata: dict[str, Any] | None = None, question: str = "question") -> Problem:
    messages = [{"role": "user", "content": question}]
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
    ("choice", "B", "\\boxed{\\textbf{(B) }42}"),
    ("number", "42", "\\textbf{42}"),
    ("number", "42", "x_1 = x_2 = 42"),
    ("math", "42", "A = \\frac{1}{2}bh = \\frac12 \\cdot 12 \\cdot 7 = 42"),
    ("math", "42", "m = \\frac{a + b}{2} = 42"),
    ("math", "42", "V = \\dfrac43 \\pi r^3 = 42"),
    ("number", "42", "C = 2\\pi r = 42"),
    ("number", "42", "P = 2(l + w) = 42"),
    ("math", "42", "42\\;\\text{cm}"),
    ("math", "\\frac{1}{3}", "0.333333"),
    ("math", "0.166667", "\\frac{1}{6}"),
    ("math", "0.066667", "\\frac{1}{15}"),
    ("math", "\\sqrt{2}", "1.41421356"),
    ("math", "\\sqrt{2}", "1.414214"),
    ("math", "0", "\\sqrt{2}\\sqrt{3}-\\sqrt{6}"),
    ("math", "\\infty", "\\infty + 1"),
    ("math", "10^{-20}", "0.1^{20}"),
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
    ("number", "42", "x = 41 or x = 42"),
    ("number", "42", "x = 43y = 42"),
    ("number", "42", "x = \\quad43y = 42"),
    ("number", "42", "x = 41 (x) = 42"),
    ("number", "42", "x = 4 cm = 42"),
    ("math", "42", "x = \\frac{1}{2} = 42"),
    ("math", "42", "x = \\frac{1}{2}y, y = 42"),
    ("math", "42", "A = \\frac{1}{2}bh = 41"),
    ("math", "1.6 \\times 10^{-19}", "10^{-100}"),
    ("math", "10^{-20}", "10^{-30}"),
    ("math", "(10^{-20}, 1)", "(10^{-30}, 1)"),
    ("math", "0", "10^{-200}"),
    ("math", "2\\,(x+1)", "2(x+1), 3"),
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


@pytest.mark.parametrize(
    ("question", "gold", "copied", "right"),
    [
        ("What is $37 \\cdot 43$?", "1591", "x = 37\\times 43", "37 \\cdot 43 = 1591"),
        ("Simplify \\[\\sqrt{72}.\\]", "6\\sqrt{2}", "\\sqrt{72}", "6 \\sqrt 2"),
        ("What is 5!?", "120", "5!", "120"),
        ("Find \\(\\frac{d}{dx} x^3\\).", "3x^2", "\\frac{d}{dx} x^3", "3x^2"),
        ("Solve $x^2 = 4$ for $x > 0$.", "x = 2", "x^2 = 4", "2"),
        ("What is $\\frac{84}{2}$?", "42", "\\frac{84}{2}", "\\frac{84}{2} = 42"),
        ("Is $\\frac{1}{2}$ or $0.4$ larger?", "0.5", "0.4", "\\frac{1}{2}"),
        ("Which angle is larger, $90^\\circ$ or $45^\\circ$?", "90", "45^\\circ", "90^\\circ"),
        ("Which is the irrational one, $\\sqrt{2}$ or $\\sqrt{4}$?", "$\\sqrt{2}$", "\\sqrt{4}", "\\sqrt 2"),
        ("Which line is steeper, $y = 2x + 1$ or $y = 3x + 1$?", "y = 3x+1", "2x + 1", "3x + 1"),
        ("Which point is on it, $(1, -2)$ or $(2, 1)$?", "x=1,y=-2", "(2, 1)", "x = 1, y = -2"),
    ],
)
def test_a_calculation_of_the_question_is_no_answer_to_it(question: str, gold: str, copied: str, right: str) -> None:
    assert verify(problem("math", gold, question=question), copied) == 0.0
    assert verify(problem("math", gold, question=question), right) == 1.0
    assert verify(problem("math", gold, question=question), gold) == 1.0


def test_a_division_of_the_question_is_no_number() -> None:
    asked = problem("number", "42", question="What is 84/2?")
    assert verify(asked, "84/2") == 0.0 and verify(asked, "84/2 = 42") == verify(asked, "126/3") == 1.0
    assert verify(problem("number", "3.5", question="What is 7/2 as a decimal number?"), "7/2") == 1.0


@pytest.mark.parametrize(
    "question",
    [
        "Find the increase as a percent.",
        "What is the probability that a student who plays football plays tennis for 1.5 hours, too, as a percent?",
        "In percent, what is the error?",
        "how much is the discount, in percent?",
        "What is the corresponding percent decrease?",
        "What was the overall percent change?",
        "What is the approximate percentage of boys?",
        "Give it to the nearest tenth of a percent.",
        "Convert 1/4 to a percent.",
    ],
)
def test_a_question_for_percent(question: str) -> None:
    for rule in ("math", "number"):
        assert verify(problem(rule, "25", question=question), "25\\%") == 1.0
        assert verify(problem(rule, "25", question=question), "0.25\\%") == 0.0


@pytest.mark.parametrize(
    "question",
    [
        "What is 20 percent of 125?",
        "What is twenty percent of 125?",
        "What is n percent of 50?",
        "Find fifty percent of 50.",
        "The discount is stated in percent. It is 20. What does it cost?",
        "Its price rises by 25 percent from 20. What is it now?",
    ],
)
def test_a_number_in_percent_is_no_question_for_it(question: str) -> None:
    for rule in ("math", "number"):
        assert verify(problem(rule, "25", question=question), "25%") == 0.0


@pytest.mark.parametrize(
    "gold",
    [
        *("42", "Evelyn", "no such set exists", "(-\\infty, 3]", "]0,1[", "\\{\\}", "∞", "\\text{no solution}", "5!"),
        *(
            "2^{2^{3}}",
            "\\binom{10}{3}",
            "\\sum_{k=1}^{10} k",
            "\\begin{cases}x=1\\\\y=2\\end{cases}",
            "Yes!",
            "2^{1000}",
        ),
        *(
            "90^\\circ",
            "10/0.5",
            "a) five apples",
            "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
            "1,000",
            "\\$5",
            "x \\in [0, 2\\pi)",
        ),
    ],
)
def test_gold_answers_of_math_that_can_be_used(gold: str) -> None:
    assert verify_gold(problem("math", gold)) == 1.0


@pytest.mark.parametrize(
    "gold",
    [
        "\\frac{1}{",
        "???",
        "\\boxed{}",
        "$$",
        "1/0",
        "\\frac{1}{0}",
        "\\frac10",
        "x+",
        "\\sqrt{",
        "((1)",
        "}{",
        "\\frac{}{2}",
    ],
)
def test_gold_answers_of_math_that_cannot_be_used(gold: str) -> None:
    assert may_take_long(problem("math", gold)) and verify_gold(problem("math", gold)) == 0.0
    assert not may_take_long(problem("exact", gold))


def test_few_gold_answers_of_math_need_a_process() -> None:
    plain = [
        "42",
        "-1,000.5",
        "\\frac{3\\sqrt{2}}{2}",
        "x^{12}+3",
        "(1,2)",
        "[0,1)",
        "\\text{odd}",
        "25\\%",
        "y=2x+1",
        "7!",
    ]
    assert not any(may_take_long(problem("math", gold)) for gold in plain)


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
