"""Whatever reads a model's text takes steps in proportion to its length. Counted, not timed: of each regular expression
by a matcher of our own, and of Python's lines by a trace."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import regex

import grpo.rewards
from benchmarks.adversarial import TEXTS, targets
from tests.support.regex_steps import Search

LENGTH = 60
GROWTH = 2.6
"""Steps of twice the length over those of the length: 2 where time is linear, 4 where it is quadratic."""
SMALL = 60 * LENGTH
"""Steps that are too few to tell growth from what happens once."""
LINES = 300
AT_ONE_PLACE = {"grpo.rewards.code._FENCE", "grpo.rewards.answers.claim._LEAD"}
"""Patterns that are matched where a line or a text begins, and never searched for."""
OTHERS = ("grpo.data.template", "grpo.judging.questions", "grpo.judging.replies", "tasks.problems.constraints")
# `regex` knows classes that `re` does not; a part of each is enough to repeat it.
_CLASSES = {
    r"\p{Latin}": "a-zA-Z",
    r"\p{Greek}": "α-ωΑ-Ω",
    r"[\p{Han}\p{Hiragana}\p{Katakana}ー--\p{Han}]": "[ぁ-ヿ]",
    r"[\p{L}\p{M}--[\p{Han}\p{Hiragana}\p{Katakana}ー]]": "[a-zA-Zα-ωа-я]",
    r"\p{Han}": "[一-龥]",
}


def plain(pattern: Any) -> str:
    source = pattern.pattern
    if isinstance(pattern, regex.Pattern):
        for known, spelt in _CLASSES.items():
            source = source.replace(known, spelt)
    return source


def patterns() -> dict[str, tuple[str, int]]:
    """Every pattern that a module of the rewards holds."""
    modules = [f"grpo.rewards.{info.name}" for info in pkgutil.walk_packages(grpo.rewards.__path__)]
    found: dict[str, tuple[str, int]] = {}
    for name in [
        *modules,
        *(info.name for info in pkgutil.walk_packages(grpo.rewards.__path__, "grpo.rewards.")),
        *OTHERS,
    ]:
        for attribute, value in vars(importlib.import_module(name)).items():
            if isinstance(value, (re.Pattern, regex.Pattern)):
                flags = re.DOTALL if isinstance(value, regex.Pattern) and value.flags & regex.DOTALL else 0
                found[f"{name}.{attribute}"] = plain(value), value.flags if isinstance(value, re.Pattern) else flags
    return found


PATTERNS = patterns()


def steps(pattern: str, flags: int, text: str, at_one_place: bool = False) -> int:
    search = Search(pattern, flags, text)
    if at_one_place:
        next(search.sequence(search.tree, 0, 0), None)
    else:
        search.all()
    return search.steps


@pytest.fixture
def deep() -> Any:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_steps_in_proportion_to_the_text(name: str, deep: None) -> None:
    pattern, flags = PATTERNS[name]
    grown = {}
    for text, make in TEXTS.items():
        once, twice = (steps(pattern, flags, make(length), name in AT_ONE_PLACE) for length in (LENGTH, 2 * LENGTH))
        if twice > max(GROWTH * once, SMALL):
            grown[text] = (once, twice)
    assert grown == {}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"answer\s*:?\s*([A-Z])", "answer and spaces"),
        (r"^\s*-\s", "line breaks"),
        (r"(?:\d+,?)+;", "number list"),
    ],
)
def test_a_slow_pattern_is_noticed(pattern: str, text: str, deep: None) -> None:
    length = 16 if ";" in pattern else LENGTH  # exponential
    once, twice = (steps(pattern, re.MULTILINE, TEXTS[text](length)) for length in (length, 2 * length))
    assert twice > GROWTH * once


@pytest.mark.parametrize(
    "pattern", [r"(?<!\w)\w++(?:[.,]\d++)*+", r"\s+$", r"(a|ab)(c|bcd)(d*)", r"<(b|i)>(.*?)</\1>", "x*?y"]
)
def test_the_matcher_finds_what_re_finds(pattern: str) -> None:
    for text in ("abcd abcd", "1,2,3 a.5", "a  \n b  ", "<b>x<i></b>y</i>", "xxyxy"):
        assert Search(pattern, 0, text).all() == [match.span() for match in re.finditer(pattern, text)]


def lines(function: Callable[[str], Any], text: str) -> int:
    """Lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function(text)
    finally:
        sys.settrace(None)
    return count


TARGETS = targets()


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "verifier math"])
def test_a_reward_runs_lines_in_proportion_to_the_text(name: str) -> None:
    TARGETS[name]("so 42")  # imports, tables
    grown = {}
    for text, make in TEXTS.items():
        TARGETS[name](make(2 * LINES))  # and caches
        once, twice = (lines(TARGETS[name], make(length)) for length in (LINES, 2 * LINES))
        if twice > max(GROWTH * once, 10 * LINES):
            grown[text] = (once, twice)
    assert grown == {}
