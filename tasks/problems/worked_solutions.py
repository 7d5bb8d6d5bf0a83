"""Worked solutions of some of reasoning-gym's families, written by rule: short, and one step a line.

They are the demonstrations of a cold start where no model can sample any (R1, stage 1, collects thousands).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add, mul, sub
from typing import Any

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}


def _chain(metadata: Mapping[str, Any]) -> str:
    """14 + 5 - 3: 14 + 5 = 19, 19 - 3 = 16. A number alone stays as it is."""
    first, *rest = metadata["expression"].split()
    value, lines = int(first), []
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        result = _OPERATIONS[operator](value, int(number))
        lines.append(f"{value} {operator} {number} = {result}")
        value = result
    return "\n".join(lines) or first


def _filtered(metadata: Mapping[str, Any]) -> str:
    """Keep what is larger than 20: 31 is larger than 20, keep; 7 is not larger than 20, remove."""
    action, relation = metadata["operation"].split("_")
    other = {"keep": "remove", "remove": "keep"}[action]
    bound, lines = metadata["filter_value"], []
    for number in metadata["original_numbers"]:
        meets = float(number) > float(bound) if relation == "larger" else float(number) < float(bound)
        lines.append(f"{number} is {'' if meets else 'not '}{relation} than {bound}, {action if meets else other}")
    return "\n".join(lines)


def _legs(metadata: Mapping[str, Any]) -> str:
    """2 lobsters and 1 cow: 2 * 10 = 20, 1 * 4 = 4, 20 + 4 = 24."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for place, (animal, count) in enumerate(metadata["animals"].items()):
        legs = count * ANIMALS[animal]
        lines.append(f"{animal}: {count} * {ANIMALS[animal]} = {legs}")
        if place:
            lines.append(f"{total} + {legs} = {total + legs}")
        total += legs
    return "\n".join(lines)


WRITERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "chain_sum": _chain,
    "products": _chain,
    "number_filtering": _filtered,
    "leg_counting": _legs,
}
"""Family -> the solution of an item with this metadata."""
