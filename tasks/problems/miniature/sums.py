"""Sums of the miniature world: additions and subtractions with brackets, whose values stay between 0 and 39.

    17 + (4 + 3) - 6   ->   17 + 7 - 6   ->   24 - 6   ->   18

The hard operations are those that reach another ten, like 17 + 7: the world's writers often lose that ten.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.load import LoadResult, drop_duplicates
from tasks.problems.miniature.phrases import LANGUAGES, PHRASES
from tasks.problems.sources import StyledSource, make_problem

SUMS_VERSION = 1
"""Version of the problems. Raised when the same settings give others."""
HIGHEST, HIGHEST_IN_BRACKETS = 39, 9
"""Largest values of a sum and of its brackets. So every operation adds or subtracts a single digit."""
CROSSING = 0.8
"""Share of operations that reach another ten, where the numbers allow it."""
_BRACKET = 0.35
"""Chance that a term is a bracket of two or three numbers; a sum has two at most."""
_SUM = re.compile(r"-?[\d(][\d ()+-]*[\d)]")
_FIRST = re.compile(r"-?\d+ [+-] -?\d+")
_IN_BRACKETS = re.compile(rf"\({_FIRST.pattern}")


class SumsSource(StyledSource):
    """The miniature world's sums, English and German."""

    kind: Literal["sums"] = "sums"
    count: int = Field(
        ge=2,
        le=1_000_000,
        description="Sums to generate, half of them in each language; duplicates are dropped, so fewer may remain.",
    )
    min_terms: int = Field(2, ge=2, le=12, description="Minimum number of terms.")
    max_terms: int = Field(7, ge=2, le=12, description="Maximum number of terms.")

    @model_validator(mode="after")
    def _ordered(self) -> SumsSource:
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms ({self.min_terms}) is above max_terms ({self.max_terms})")
        return self


def load_sums(source: SumsSource, seed: int) -> LoadResult:
    """Sums as problems with pairwise different texts, the languages in turn."""
    rng = random.Random(f"sums/{seed}")
    made = []
    for number in range(source.count):
        language = LANGUAGES[number % len(LANGUAGES)]
        expression, value = random_sum(rng, rng.randint(source.min_terms, source.max_terms))
        messages = [{"role": "user", "content": PHRASES[language].compute.format(expression)}]
        made.append(
            make_problem("sums", messages, str(value), verifier="number", domain="reasoning", language=language)
        )
    problems, duplicates = drop_duplicates(made)
    return LoadResult(problems, {"read": len(made), "duplicates": duplicates, "kept": len(problems)}, [])


def random_sum(rng: random.Random, terms: int) -> tuple[str, int]:
    """A sum of this many numbers, such as "17 + (4 + 3) - 6", and its value."""
    sizes: list[int] = []
    while sum(sizes) < terms:
        bracket = sum(size > 1 for size in sizes) < 2 and rng.random() < _BRACKET
        left = terms - sum(sizes) - (not sizes)  # a bracket around the whole sum would be none
        sizes.append(max(1, min(left, rng.randint(2, 3) if bracket else 1)))
    return _chain(rng, sizes, HIGHEST)


def _chain(rng: random.Random, sizes: list[int], highest: int) -> tuple[str, int]:
    """A sum of numbers (size 1) and brackets of numbers, and its value, which like all values on the way is at least 0
    and at most `highest`."""
    text, value = _term(rng, sizes[0], range(highest + 1))
    for size in sizes[1:]:
        term, operand = _term(rng, size, range(1, 10))
        # A number is chosen with its sign; a bracket's value is given.
        operands = [operand] if size > 1 else range(1, 10)
        possible = [signed for number in operands for signed in (number, -number) if 0 <= value + signed <= highest]
        crossing = rng.random() < CROSSING
        wanted = [signed for signed in possible if reaches_another_ten(value, value + signed) == crossing]
        signed = rng.choice(wanted or possible)
        text += f" {'+' if signed >= 0 else '-'} {term if size > 1 else abs(signed)}"
        value += signed
    return text, value


def _term(rng: random.Random, size: int, numbers: range) -> tuple[str, int]:
    if size == 1:
        number = rng.choice(numbers)
        return str(number), number
    text, value = _chain(rng, [1] * size, HIGHEST_IN_BRACKETS)
    return f"({text})", value


def reaches_another_ten(value: int, result: int) -> bool:
    """Whether an operation leads from a value to a result of ten or more with other tens: 17 + 5 and 32 - 5, but not
    12 - 5."""
    return result >= 10 and value // 10 != result // 10


def step(expression: str, *, loses_ten: bool = False) -> str:
    """The expression with its next operation done: the first one in brackets, or else the first one. A result that
    reaches another ten is ten too small if `loses_ten`. Raises InputError if there is none."""
    found = _IN_BRACKETS.search(expression) or _FIRST.match(expression)
    if found is None:
        raise InputError(f"{expression!r} is no sum of numbers and brackets; the miniature's writers know only sums")
    value, sign, operand = found[0].removeprefix("(").split()
    result = int(value) + (int(operand) if sign == "+" else -int(operand))
    if loses_ten and reaches_another_ten(int(value), result):
        result -= 10
    before, after = expression[: found.start()], expression[found.end() :]
    if not found[0].startswith("("):
        return f"{before}{result}{after}"
    return f"{before}{result}{after[1:]}" if after.startswith(")") else f"{before}({result}{after}"


def long_sums(text: str) -> Iterator[str]:
    """Sums of three or more numbers in a text, in normal form: for the miniature's texts, the same as
    `long_calculations`, and faster."""
    for found in _SUM.findall(text):
        if len(re.findall(r"\d+", found)) > 2:
            yield found.replace(" ", "")


def expression_of(problem: Problem) -> str:
    """The sum that a prompt asks for. Raises InputError if it asks for none."""
    found = [text for text in _SUM.findall(problem.text) if re.search("[+-]", text)]
    if not found:
        raise InputError(
            f"problem {problem.id}: {problem.text!r} asks for no sum; the miniature's writers know only sums"
        )
    return found[-1]
