"""Whatever a model writes, every reward, verifier and constraint gives a score in its range and raises nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import strategies as st

from grpo.data.records import Problem
from grpo.data.template import AnswerForm, form_of
from grpo.processes.pool import Failure, Pool
from grpo.rewards.arithmetic import chains
from grpo.rewards.code import extract
from grpo.rewards.functions import Response
from grpo.rewards.registry import REWARDS, score_one
from grpo.rewards.steps import STEP_REWARDS, split_steps, step_rewards
from grpo.rewards.text import conclusions
from grpo.rewards.verifiers import verify
from tasks.problems.answer_leaks import states_answer
from tasks.problems.constraints import read_constraints, satisfied
from tasks.problems.reasoning_gym import generate
from tasks.problems.sources import ReasoningGymSource
from tests.support.fuzzing import fuzz
from tests.support.hostile_texts import completions, pieces

RULES = {"exact": "42", "number": "42", "choice": "B", "math": "42"}
PROBLEMS = {
    **{f"{rule} {gold}": (rule, gold) for rule, gold in RULES.items()},
    **{f"math {gold}": ("math", gold) for gold in ("\\frac{1}{2}", "x^2+1", "\\{1,2\\}", "x \\le 3", "$x=2$ or $x=3$")},
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"kind": "words", "max": 5},
    {"kind": "sentences", "min": 2},
    {"kind": "bullets", "min": 1},
    {"kind": "includes", "words": ["answer", "42"]},
    {"kind": "excludes", "words": ["the answer"]},
    {"kind": "starts_with", "text": "42"},
    {"kind": "ends_with", "text": "42"},
    {"kind": "language", "language": "de"},
    {"kind": "json", "keys": ["analysis"]},
]


def problem(verifier: str, answer: str, **metadata: Any) -> Problem:
    messages = [{"role": "user", "content": "question"}]
    return Problem("p", messages, answer, verifier, "reasoning", "en", "fuzz", metadata)


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in ("accuracy", "consistency")])
def test_rewards(name: str, record_property: Any) -> None:
    def check(text: str, style: str, finished: bool) -> None:
        asked = problem("number", "42", answer_style=style)
        assert -(10**6) < score_one(name, {}, asked, Response.to(asked, text, len(text), finished, 4000)) <= 1

    fuzz(
        check,
        record_property,
        text=completions,
        style=st.sampled_from(["tags", "boxed", "auto"]),
        finished=st.booleans(),
    )


@pytest.fixture(scope="module")
def pool() -> Any:
    """As in training: math-verify may take long, and is killed then."""
    with Pool(1, 20.0, 4 << 30, prepare=functools.partial(verify, problem("math", "1"), "2")) as workers:
        yield workers


@pytest.mark.parametrize("case", PROBLEMS)
def test_verifiers(case: str, pool: Pool, record_property: Any) -> None:
    def check(answer: str) -> None:
        score = pool.submit(verify, problem(*PROBLEMS[case]), answer).result()
        if isinstance(score, Failure):
            assert score.kind in ("timeout", "memory"), (score.kind, score.message)
        else:
            assert score in (0.0, 1.0)

    fuzz(check, record_property, answer=pieces)


FAMILIES = (
    *(
        "chain_sum",
        "countdown",
        "puzzle24",
        "bitwise_arithmetic",
        "number_sorting",
        "string_insertion",
        "spiral_matrix",
    ),
    *("n_queens", "polynomial_multiplication", "simple_integration", "propositional_logic", "rotate_matrix"),
)
"""Of reasoning-gym: those whose scorers evaluated the answer, and some others."""


@pytest.mark.parametrize("family", FAMILIES)
def test_scorers_of_reasoning_gym(family: str, pool: Pool, record_property: Any) -> None:
    [asked] = generate(ReasoningGymSource(family=family, count=1), seed=0)

    def check(answer: str, around: bool) -> None:
        score = pool.submit(verify, asked, asked.answer + answer if around else answer).result()
        if isinstance(score, Failure):
            assert score.kind in ("timeout", "memory"), (score.kind, score.message)
        else:
            assert score in (0.0, 1.0)

    fuzz(check, record_property, answer=pieces, around=st.booleans())


@pytest.mark.parametrize("rule", ["exact", "number", "choice"])
def test_consistency(rule: str, record_property: Any) -> None:
    asked = problem(rule, RULES[rule])

    def check(text: str) -> None:
        assert score_one("consistency", {}, asked, Response.to(asked, text, 9, True, 4000)) in (0.0, 1.0)

    fuzz(check, record_property, text=completions)


def test_answers_in_the_reasoning_alone(record_property: Any) -> None:
    def check(reasoning: str) -> None:
        for style in ("tags", "boxed", "auto"):
            asked = problem("number", "42", answer_style=style)
            assert (
                verify(asked, form_of(asked).parse(f"<think>{reasoning}<answer>42</answer>\\boxed{{42}}").answer) == 0
            )

    fuzz(check, record_property, reasoning=pieces.filter(lambda text: "</" not in text))


def test_completions_taken_apart(record_property: Any) -> None:
    def check(text: str) -> None:
        for style in ("tags", "boxed", "auto"):
            parts = AnswerForm(style).parse(text)  # type: ignore[arg-type]
            assert not parts.well_formed or (parts.reasoning and parts.answer)
        assert all(0 <= start < end <= len(text) for start, end in split_steps(text))
        assert isinstance(extract(text), str) and all(isinstance(found, str) for found in conclusions(text))
        chains(text), states_answer(text, "42")

    fuzz(check, record_property, text=completions)


@pytest.mark.parametrize("name", STEP_REWARDS)
def test_step_rewards(name: str, record_property: Any) -> None:
    def check(text: str) -> None:
        assert all(value in (0.0, 1.0) for _, value in step_rewards(name, problem("number", "42"), text))

    fuzz(check, record_property, text=completions)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint["kind"])
def test_constraints(constraint: dict[str, Any], record_property: Any) -> None:
    [read] = read_constraints({"constraints": [constraint]})

    def check(text: str) -> None:
        assert satisfied(read, text) in (True, False)

    fuzz(check, record_property, text=completions)
