"""Sums of the miniature world: random ones, and those that a prompt asks for."""

from __future__ import annotations

import random
import re

from grpo.data.records import Problem
from grpo.errors import InputError


def random_sum(rng: random.Random, terms: tuple[int, int]) -> str:
    """A sum of single digits such as "4 - 1 + 7". `terms`: minimum and maximum number of terms."""
    numbers = [str(rng.randint(0, 9)) for _ in range(rng.randint(*terms))]
    return numbers[0] + "".join(f" {rng.choice('+-')} {number}" for number in numbers[1:])


def expression_of(problem: Problem) -> str:
    """The sum that a prompt asks for. Raises InputError if it asks for none."""
    expressions = re.findall(r"-?\d+(?: [+-] \d+)+", problem.text)
    if not expressions:
        raise InputError(
            f"problem {problem.id}: {problem.text!r} asks for no sum; the miniature's writers know only sums"
        )
    return expressions[-1]
