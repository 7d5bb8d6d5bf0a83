"""Arithmetic in text: what it is worth, exactly, and what is left unread."""

from __future__ import annotations

from fractions import Fraction

import pytest

from grpo.rewards.arithmetic import MAX_BITS, Side, agree, chains, expressions, value


@pytest.mark.parametrize(
    ("expression", "worth"),
    [
        ("8 - 1", 7),
        ("-4 + 7", 3),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("8 - 3 - 2", 3),
        ("12 / 4 / 3", 1),
        ("-2^2", -4),
        ("2^3^2", 512),  # 2^9
        ("2**-1", Fraction(1, 2)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1,000 + .5", Fraction(2001, 2)),
        ("50% * 3", Fraction(3, 2)),
    ],
)
def test_exact_values(expression, worth):
    assert value(expression) == worth


@pytest.mark.parametrize(
    "expression",
    [
        *("", "x", "3 +", "* 3", "7 8", "2(3)", "(3", "3)", "1 / 0", "0^-1", "2^(1/2)", "1,00", "os.abort()", "3 = 3"),
        *("9^(9^9)", "(9^99)^99", "1" * 51, "+".join("1" * 60), f"2^{MAX_BITS}"),
    ],
)
def test_what_has_no_value(expression):
    assert value(expression) is None


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("8 - 1 = 7", [[7, 7]]),
        ("2 * 3 = 6 = 12 / 2", [[6, 6, 6]]),
        ("3 + 4 = 7, so 7 × 2 = 14.", [[7, 7], [14, 14]]),
        ("first 5 + 3 - 1", [[7]]),
        ("then -4 + 7", [[3]]),
        ("Step 3: 8 − 1 = 7", [[3], [7, 7]]),
        ("2. 3 + 4 = 7", [[7, 7]]),
        ("- 3 + 4 = 7", [[7, 7]]),  # a list mark, no minus
        ("$1,000 + $500 = $1,500", [[1500, 1500]]),
        ("$\\frac{1}{2} \\times 6 = 3$", [[3, 3]]),
        ("2^{10} = \\boxed{1024}", [[1024, 1024]]),
        ("10 \\div 4 = 2.5", [[Fraction(5, 2), Fraction(5, 2)]]),
        ("3 + 4 == 7", [[7, 7]]),
        # What stands beside a variable, a unit or a function has no value.
        ("x - 3 = 7", [[None, 7]]),
        ("x-3=7", [[None, 7]]),
        ("x = 7 = 3 + 4", [[None, 7, 7]]),
        ("2x + 3 = 7", [[None], [None, 7]]),
        ("3 + 4 = 7kg", [[7, None]]),
        ("f(2) = 5", [[None, 5]]),
        ("3 = 2\\sqrt{2}", [[3, None], [2]]),
        ("325 chickens - 28 roosters", [[325], [None]]),
        ("nothing", []),
    ],
)
def test_expressions_of_a_line(line, read):
    assert [[side.value for side in chain] for chain in chains(line)] == read


def test_a_decimal_number_may_be_rounded():
    third = Side(Fraction(10, 3))
    assert agree(third, Side(Fraction("3.33"), decimals=2)) and agree(Side(Fraction("3.3"), decimals=1), third)
    assert not agree(third, Side(Fraction("3.34"), decimals=2))
    assert not agree(third, Side(Fraction(3)))  # 3 has no decimals, and is no rounding
    assert [side.decimals for side in chains("10 / 3 = 3.33")[0]] == [0, 2]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("compute 4 - 1 + 7", ["4-1+7"]),
        ("was ist -4 \u2212 1?", ["-4-1"]),
        ("5 \u00d7 3 = 15 and 2 + 1 = 3", ["5*3", "2+1"]),
        ("then -3", []),
        ("x + 1 = 7", []),
        ("", []),
    ],
)
def test_calculations_of_a_line(line, found):
    assert expressions(line) == found
