"""Reads expressions in Python notation with our own grammar: numbers, names, operators, a few functions, lists.

They are parsed, never evaluated as Python: no attributes, no subscripts, no text to run, and no calls except of named
functions. Sizes are limited, so that a short text such as 9**9**9 cannot fill the memory.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 10_000
MAX_EXPONENT = 1_000
MAX_BITS = 10_000
"""Limits: characters of an expression, size of an exponent or a shift, bits of a whole number."""
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift},
    **{ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert},
}


def literal(text: str, *_: Any) -> Any:
    """A number, string, list, tuple or dict, like `ast.literal_eval`. Raises ValueError for anything else."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    return _guarded(ast.literal_eval, text)


def whole(text: str, *_: Any) -> int:
    """The value of an expression of whole numbers, including hexadecimal ones, with bitwise operators. Raises
    ValueError for anything else."""
    return int(_read(text, int, {}, lambda name: None))


def arithmetic(text: str, *_: Any, **__: Any) -> Fraction:
    """The exact value of an expression of numbers. Raises ValueError for anything else."""
    return Fraction(_read(text, lambda value: Fraction(str(value)), {}, lambda name: None))


def exact_integer(text: str, *_: Any, **__: Any) -> int:
    """Like `arithmetic`, for whole numbers only. Raises ValueError for others: 24.5 is not 24."""
    value = arithmetic(text)
    if value.denominator != 1:
        raise ValueError(f"{value} is not whole")
    return int(value)


def symbolic(text: str, local_dict: Mapping[str, Any] | None = None, **_: Any) -> Any:
    """An expression as a sympy object. Names are symbols, except those in `local_dict`, constants and elementary
    functions. Raises ValueError if it is not an expression."""
    import sympy

    functions = {
        name: getattr(sympy, name)
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh")
    }
    functions |= {name: getattr(sympy, name) for name in ("exp", "log", "sqrt", "Abs", "erf", "Integer", "Rational")}
    functions |= {"ln": sympy.log, "Symbol": None}
    known = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, **(local_dict or {})}

    def symbol(name: str) -> Any:
        return known[name] if name in known else sympy.Symbol(name)

    def number(value: Any) -> Any:
        return sympy.Integer(value) if isinstance(value, int) else sympy.Float(repr(value))

    return _read(text, number, functions, symbol)


_NUMERAL = re.compile(r"([0-9]+)|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def numeral(text: str) -> Any:
    """A whole or decimal number as a sympy object, equal to ``sympy.Number(text)``, which would evaluate text. Raises
    ValueError if it is not a number."""
    import sympy

    match = _NUMERAL.fullmatch(text.strip())
    if match is None:
        raise ValueError("no number")
    return sympy.Integer(int(match[0])) if match[1] else sympy.Float(match[0])


def _read(text: str, number: Callable[[Any], Any], functions: Mapping[str, Any], symbol: Callable[[str], Any]) -> Any:
    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=constant) if type(constant) in (int, float):
                return number(constant)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _limited(type(op), value(left), value(right))
            case ast.Name(id=name) if "_" not in name and (found := symbol(name)) is not None:
                return found
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if functions.get(name):
                return functions[name](*map(value, arguments))
        raise ValueError(f"{type(node).__name__} is no part of an expression")

    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    return _guarded(lambda: value(ast.parse(text.strip(), mode="eval").body))


def _limited(op: type[ast.AST], left: Any, right: Any) -> Any:
    if op in (ast.Pow, ast.LShift, ast.RShift) and _is_number(right) and abs(right) > MAX_EXPONENT:
        raise ValueError(f"an exponent above {MAX_EXPONENT}")
    if op is ast.Pow and isinstance(left, (int, Fraction)) and not _is_whole(right):
        raise ValueError("a root")
    result = _OPERATORS[op](left, right)
    numbers = (result.numerator, result.denominator) if isinstance(result, (int, Fraction)) else ()
    if any(part.bit_length() > MAX_BITS for part in numbers):
        raise ValueError(f"a number above {MAX_BITS} bits")
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, Fraction)) or (getattr(value, "is_number", False) and value.is_real is not False)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, Fraction)) and value.denominator == 1


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"no expression: {type(error).__name__}") from None
