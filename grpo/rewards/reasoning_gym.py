"""The verifier of reasoning-gym's problems: each family's own scorer, without evaluating anything that a model wrote.

Scorers of several families pass the answer, or a field of the problem, to Python's `eval` or to sympy's `parse_expr`,
which also evaluates it. Here these names are replaced by readers from `grpo.rewards.expressions`. All scorers run under
`no_evaluation`: if a family evaluates in a way unknown to us, it fails, and its answers count as wrong.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import json
import re
import tokenize
import types
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.answers.numbers import value
from grpo.rewards.evaluation_guard import no_evaluation
from grpo.rewards.expressions import arithmetic, exact_integer, literal, symbolic, whole

MAX_CHARACTERS = 20_000
"""Maximum length of an answer that is scored; some families' scorers take quadratic time."""
_READERS: dict[str, dict[str, Callable[..., Any]]] = {
    "algorithmic.string_insertion": {"eval": literal},
    "algorithmic.spiral_matrix": {"eval": literal},
    "algorithmic.binary_matrix": {"eval": literal},
    "algorithmic.number_sorting": {"eval": literal},
    "games.n_queens": {"eval": literal},
    "arithmetic.bitwise_arithmetic": {"eval": whole},
    "games.countdown": {"parse_expr": arithmetic},
    "games.puzzle24": {"parse_expr": exact_integer},
    "algebra.polynomial_multiplication": {"sp.parse_expr": symbolic},
    "algebra.simple_integration": {"sympy.parse_expr": symbolic},
    "algebra.intermediate_integration": {"sympy.parse_expr": symbolic},
}
"""Module of a family -> name in it that would evaluate text -> the reader that replaces it."""
_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, StopIteration, SyntaxError),
    tokenize.TokenError,
)
"""Exceptions that parsing code raises on malformed text."""


_LETTER, _SEPARATOR, _DIGIT = re.compile(r"[^\W\d_]"), re.compile(r"[\s,;|/]"), re.compile(r"[1-9]")


def _has_more(text: str) -> bool:
    """Whether text beside the gold answer holds a word, or a number of its own."""
    return bool(_LETTER.search(text) or (_SEPARATOR.search(text) and _DIGIT.search(text)))


def _nothing_more(answer: str, entry: dict[str, Any]) -> bool:
    """Whether an answer that contains the gold one is not one of several: many scorers look for the gold answer in any
    text. True in families without a gold answer, whose scorers check the whole text."""
    gold, said = (" ".join(str(text).casefold().split()) for text in (entry.get("answer") or "", answer))
    if not gold:
        return True
    before, found, after = said.partition(gold)
    return not (found and (_has_more(before) or _has_more(after)))


def _is_gold_word(answer: str, entry: dict[str, Any]) -> bool:
    return bool(answer.lower() == entry["answer"].lower())


def _is_gold_number(answer: str, entry: dict[str, Any]) -> bool:
    said, gold = value(answer), value(entry["answer"])
    if said is None or gold is None:
        return False
    return abs(said - gold) <= min(Fraction(1, 10_000), abs(gold) / 1000)  # of 3e-5, too, three digits are right


def _sorts_the_numbers(answer: str, entry: dict[str, Any]) -> bool:
    said, gold = (
        [value(str(number)) for number in json.loads(text.replace("'", '"'), parse_float=str, parse_int=str)]
        for text in (answer, entry["answer"])
    )
    return said == gold


def _concludes(answer: str, entry: dict[str, Any]) -> bool:
    """Whether a conclusion is more than premises joined by ∧, however they are written."""
    from reasoning_gym.logic.propositional_logic import Expression, Operator

    names = entry["metadata"]["variables"]
    worlds = [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))]

    def holds(expression: Any) -> list[bool]:
        return [expression.evaluate(world) for world in worlds]

    def copied(expression: Any) -> bool:
        if holds(expression) in premises:
            return True
        return expression.operator == Operator.AND and copied(expression.left) and copied(expression.right)

    premises = [holds(Expression.from_string(premise)) for premise in entry["metadata"]["premises"]]
    return not copied(Expression.from_string(answer))


def _uses_the_numbers(answer: str, entry: dict[str, Any]) -> bool:
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(map(int, entry["metadata"]["numbers"]))


_ALSO: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "game_of_life_halting": _is_gold_word,  # its scorer takes any text
    "complex_arithmetic": lambda answer, entry: "nan" not in answer.lower(),  # min(1.0, nan) is 1.0
    "coin_flip": _is_gold_number,  # its scorer takes the digits that a wrong number begins with
    "gsm_symbolic": _is_gold_number,  # its scorer takes the first number of any text, without its sign
    "number_sorting": _sorts_the_numbers,  # its scorer takes NaN, and numbers that are off by 1
    "propositional_logic": _concludes,  # its scorer takes a copied premise
    "puzzle24": _uses_the_numbers,  # its scorer takes any four numbers of the range
}
"""Family -> what an answer with full marks must fulfil besides, where the family's own scorer accepts wrong answers;
`_nothing_more` for all others. An exception from `_UNREADABLE` means no."""


def reasoning_gym(problem: Problem, answer: str) -> float:
    """1.0 if reasoning-gym's scorer for the problem's family gives full marks, else 0.0.

    Partial marks are not used. A third of the families have no scorer of their own and give partial marks to any answer
    that contains the gold one, so -4 would earn half the marks of 4; others reward attempts. `metadata` holds "family",
    "entry" (see `pack_entry`) and, if the generator had any, "parameters", which some scorers read.

    A scorer may raise any exception on an answer that it cannot read. The answer is wrong if the scorer gives the gold
    answer full marks, or if the family has no gold answer (`boxnet`); otherwise the exception is raised.
    """
    try:
        family, entry, score = read_metadata(problem.metadata)
    except InputError as error:
        raise InputError(f"problem {problem.id}: {error}") from None
    if len(answer) > max(MAX_CHARACTERS, 2 * len(problem.answer)):
        return 0.0
    with no_evaluation():
        try:
            right = float(score(answer.strip(), entry)) >= 1.0
            return float(right and _ALSO.get(family, _nothing_more)(answer.strip(), entry))
        except _UNREADABLE:
            if not problem.answer or (answer.strip() != problem.answer.strip() and score(problem.answer, entry) >= 1.0):
                return 0.0
            raise


def read_metadata(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any], Callable[[str, dict[str, Any]], float]]:
    """(family, entry, the family's scorer) of a problem's metadata. Raises InputError if it is malformed."""
    parameters = metadata.get("parameters") or {}
    given: dict[str, Any] = {"family": metadata.get("family"), "entry": metadata.get("entry"), "parameters": parameters}
    for name, kind in (("family", str), ("entry", dict), ("parameters", dict)):
        if not isinstance(given[name], kind):
            needed = f", {'text' if kind is str else 'an object'}, not {given[name]!r:.60}" if name in metadata else ""
            raise InputError(f"verifier 'reasoning_gym' needs metadata['{name}']{needed}")
    score = _scorer(given["family"], json.dumps(parameters, sort_keys=True))
    return given["family"], unpack_entry(given["entry"]), score


def pack_entry(value: Any) -> Any:
    """A reasoning-gym entry in a form that JSON can store, preserving tuples and integer keys, which some scorers
    need."""
    if isinstance(value, tuple):
        return {"__tuple__": [pack_entry(v) for v in value]}
    if isinstance(value, list):
        return [pack_entry(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: pack_entry(v) for k, v in value.items()}
        return {"__items__": [[pack_entry(k), pack_entry(v)] for k, v in value.items()]}
    return value


def unpack_entry(value: Any) -> Any:
    """The inverse of `pack_entry`."""
    if isinstance(value, list):
        return [unpack_entry(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(unpack_entry(v) for v in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {unpack_entry(k): unpack_entry(v) for k, v in value["__items__"]}
        return {k: unpack_entry(v) for k, v in value.items()}
    return value


@functools.cache
def _scorer(family: str, parameters: str) -> Callable[[str, dict[str, Any]], float]:
    datasets = _datasets()
    if family not in datasets:
        close = difflib.get_close_matches(family, datasets)
        raise InputError(f"unknown reasoning-gym family {family!r}" + (f"; close: {', '.join(close)}" if close else ""))
    dataset, config = datasets[family]
    try:
        score: Callable[[str, dict[str, Any]], float] = dataset(config=config(**json.loads(parameters))).score_answer
    except (AssertionError, AttributeError, ValueError, TypeError) as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"metadata['parameters']: {family} does not accept {parameters:.80}: {reason}") from None
    return score


@functools.cache
def _datasets() -> dict[str, Any]:
    """reasoning-gym's families, with our readers patched into their modules."""
    from reasoning_gym.factory import DATASETS

    for name, readers in _READERS.items():
        module = importlib.import_module(f"reasoning_gym.{name}")
        for target, reader in readers.items():
            inner, _, attribute = target.rpartition(".")
            if inner:  # patch only this module's view of sympy; all others keep the real one
                setattr(module, inner, _with(getattr(module, inner), attribute, reader))
            else:
                setattr(module, attribute, reader)
    return dict(DATASETS)


def _with(module: types.ModuleType, attribute: str, value: Any) -> types.ModuleType:
    """A copy of a module in which one attribute has another value."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**module.__dict__, attribute: value})
    return copy
