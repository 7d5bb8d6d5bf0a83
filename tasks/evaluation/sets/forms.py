"""Converts rows of known test sets into the columns of any problem source: question, answer, tests, constraints."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import random
import string
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from grpo.errors import InputError
from grpo.rewards.code import Grading
from tasks.evaluation.sets.known import Form, KnownSet
from tasks.problems.sources import short

Row = dict[str, Any]
_PACKED_MAX = 512 * 2**20
"""Maximum size in bytes of unpacked tests."""


def choices(known: KnownSet, where: str, row: Row) -> Row:
    """A question with its lettered choices, and the letter of the right one.

    The order is drawn from the hash of the question, so it is the same in every run, and no letter is right more often.
    """
    question, right = _text(row, known.prompt, where), _text(row, known.answer, where)
    texts = [right, *(_text(row, name, where) for name in known.wrong)]
    random.Random(hashlib.sha256(question.encode()).digest()).shuffle(texts)
    lettered = [f"{letter}) {text}" for letter, text in zip(string.ascii_uppercase, texts, strict=False)]
    return {"question": "\n".join([question, "", *lettered]), "answer": string.ascii_uppercase[texts.index(right)]}


def tests(known: KnownSet, where: str, row: Row) -> Row:
    """A programming problem in LiveCodeBench's columns. Its tests use standard input or call a function. Programs are
    graded as there."""
    question = _text(row, known.prompt, where)
    listed = [*_tests(row, "public_test_cases", where)]
    listed += [*_tests(row, "private_test_cases", where)] if row.get("private_test_cases") else []
    starter = row.get("starter_code") or ""
    functional = [test for test in listed if test.get("testtype") == "functional"]
    name = _function(row, where) if functional else ""
    converted = [_assertion(test, name, where) if test in functional else _on_stdin(test, where) for test in listed]
    ask = (
        f"Complete this program:\n```python\n{starter.rstrip()}\n```"
        if functional
        else "Write a Python program that reads from standard input and prints to standard output."
    )
    return {"question": f"{question}\n\n{ask}", "tests": converted, "code_grading": _GRADING.model_dump()}


def constraints(known: KnownSet, where: str, row: Row) -> Row:
    """A prompt in IFEval's columns, with instructions that a program can check."""
    names, options = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(names, list) or not isinstance(options, list) or len(names) != len(options) or not names:
        raise InputError(f"{where}: instruction_id_list and kwargs must be lists of one length, and not empty")
    found = [_constraint(name, option or {}, where) for name, option in zip(names, options, strict=True)]
    return {"question": _text(row, known.prompt, where), "constraints": found}


FORMS: dict[Form, Callable[[KnownSet, str, Row], Row]] = {
    "choices": choices,
    "tests": tests,
    "constraints": constraints,
}
"""Form -> its conversion. Rows of the form "answer" need none."""


def _text(row: Row, name: str, where: str) -> str:
    if name not in row:
        raise InputError(f"{where}: column {name!r} is missing; the columns are {', '.join(map(str, row)) or 'none'}")
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: {name} is {short(value)}; text is needed")
    return value.strip()


def _tests(row: Row, name: str, where: str) -> list[dict[str, Any]]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value if value.lstrip().startswith("[") else _unpacked(value))
        except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as error:
            raise InputError(f"{where}: {name} holds no list of tests: {error}") from None
    if not isinstance(value, list) or not value or not all(isinstance(test, dict) for test in value):
        raise InputError(f"{where}: {name} is {short(value)}; a list of tests is needed")
    return value


class _TextUnpickler(pickle.Unpickler):
    """Unpickles plain values only. Refuses anything that would import or call something."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}, which is not text")


def _unpacked(value: str) -> str:
    """LiveCodeBench's packed tests: JSON text that was pickled, deflated and base64-encoded."""
    inflated = zlib.decompressobj()
    data = inflated.decompress(base64.b64decode(value, validate=True), _PACKED_MAX)
    if inflated.unconsumed_tail:
        raise ValueError(f"unpacks to more than {_PACKED_MAX // 2**20} MiB")
    text = _TextUnpickler(io.BytesIO(data)).load()
    if not isinstance(text, str):
        raise TypeError("packs no text")
    return text


def _function(row: Row, where: str) -> str:
    metadata = row.get("metadata")
    try:
        name = (json.loads(metadata) if isinstance(metadata, str) else metadata or {}).get("func_name")
    except (ValueError, AttributeError):
        name = None
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"{where}: metadata must name the function that is tested, as func_name")
    return name


def _on_stdin(test: Mapping[str, Any], where: str) -> dict[str, str]:
    if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
        raise InputError(f"{where}: {short(dict(test))} is no test; it needs input and output, both text")
    return {"stdin": test["input"], "stdout": test["output"]}


def _assertion(test: Mapping[str, Any], function: str, where: str) -> dict[str, str]:
    try:
        arguments = [json.loads(line) for line in str(test["input"]).splitlines() if line.strip()]
        expected = json.dumps(json.loads(test["output"]))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{where}: {short(dict(test))} is no test of a function; values must be JSON") from None
    # As JSON, since Python takes long, and much memory, to compile a list of 100,000 numbers.
    called = f"Solution().{function}(*{_LOADS}({json.dumps(arguments)!r}))"
    return {"assert": f"assert (lambda r: list(r) if isinstance(r, tuple) else r)({called}) == {_LOADS}({expected!r})"}


_LOADS = '__import__("json").loads'
_IMPORTED = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_GRADING = Grading(
    prelude="".join(f"from {name} import *\n" for name in (*_IMPORTED, "builtins"))
    + f"import {', '.join(_IMPORTED)}\nsys.setrecursionlimit(50_000)\n",
    test_s=6.0,
    numbers=True,
)
"""As LiveCodeBench's own runner grades. Its prelude is needed: the programs to complete name List, Optional and others.
`builtins` restores the names that other modules replace, such as open."""


def _constraint(name: str, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    make = _CONSTRAINTS.get(name)
    if make is None:
        raise InputError(f"{where}: instruction {short(name)} cannot be checked; known are {', '.join(_CONSTRAINTS)}")
    try:
        return make(options)
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"{where}: {name} has options {short(dict(options))}, of which one is missing or wrong"
        ) from None


def _range(options: Mapping[str, Any], name: str) -> dict[str, int]:
    number = int(options[name])
    relation = options.get("relation") or "at least"
    if relation not in ("at least", "less than"):
        raise ValueError(relation)
    return {"min": number} if relation == "at least" else {"max": number - 1}


_CONSTRAINTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "length_constraints:number_words": lambda o: {"kind": "words", "runs": True, **_range(o, "num_words")},
    "length_constraints:number_sentences": lambda o: {"kind": "sentences", **_range(o, "num_sentences")},
    "detectable_format:number_bullet_lists": lambda o: {
        "kind": "bullets",
        "markdown": True,
        "min": int(o["num_bullets"]),
        "max": int(o["num_bullets"]),
    },
    "detectable_format:json_format": lambda o: {"kind": "json", "any_fence": True},
    "keywords:existence": lambda o: {"kind": "includes", "words": [*o["keywords"]], "whole": False},
    "keywords:forbidden_words": lambda o: {"kind": "excludes", "words": [*o["forbidden_words"]]},
    "startend:end_checker": lambda o: {"kind": "ends_with", "text": o["end_phrase"].strip(), "quoted": True},
    "language:response_language": lambda o: {"kind": "language", "language": o["language"]},
}
"""IFEval's instructions (arXiv 2311.07911, table 1) that tasks/problems/constraints.py checks, as IFEval's own program
does. Only sentences and languages are found in another way: IFEval uses NLTK's and langdetect's models."""
