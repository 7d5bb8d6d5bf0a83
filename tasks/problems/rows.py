"""Reads a row as a problem and checks that it is valid."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from grpo.data.records import Message, Problem
from grpo.data.template import STYLE_FIELD, AnswerStyle
from grpo.errors import InputError
from grpo.rewards.code import check as check_tests
from grpo.rewards.judged import JUDGED
from grpo.rewards.reasoning_gym import read_metadata
from grpo.rewards.rubric import read_rubric
from grpo.rewards.verifiers import VERIFIERS, verify
from tasks.problems.constraints import read_constraints
from tasks.problems.sources import FileSource, HubSource, label, make_problem, short

ROWS_VERSION = 1
"""Raised when the same row is read differently, or its answer is checked differently by `exact`, `number`, `math` or
`choice`. Part of the key of everything made from rows."""


def read_row(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> Problem:
    """Reads a row. `where`: its place ("train.jsonl, line 7"), for error messages."""
    verifier = _verifier(source, where, row)
    metadata = {
        name: _json_value(_column(row, name, "metadata_columns", where), name, where)
        for name in source.metadata_columns
    }
    try:
        read_constraints(metadata)
        if not read_rubric(metadata) and verifier == "rubric":
            raise InputError("verifier 'rubric' needs a rubric; keep its column, called rubric, with metadata_columns")
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if metadata.get(STYLE_FIELD) not in (None, *get_args(AnswerStyle)):
        known = ", ".join(get_args(AnswerStyle))
        raise InputError(f"{where}: {STYLE_FIELD} is {short(metadata[STYLE_FIELD])}; known are {known}")
    # Tests define what is correct, so a reference solution is optional.
    optional = verifier in ("code", "rubric") and source.answer_column not in row
    unanswered = verifier == "none" or optional
    answer, solution = ("", "") if unanswered else _answer(source, where, row, verifier)
    if solution:
        metadata.setdefault("solution", solution)
    problem = make_problem(
        label(source),
        _prompt(source, where, row),
        answer,
        verifier=verifier,
        domain=source.domain,
        language=source.language,
        metadata=metadata,
    )
    if verifier == "code":
        try:
            check_tests(metadata.get("tests"))
        except InputError as error:
            remedy = "" if "tests" in metadata else "; keep their column with metadata_columns"
            raise InputError(f"{where}: {error}{remedy}") from None
    elif verifier not in ("none", *JUDGED):
        _check_answer(source, where, problem)
    return problem


def _check_answer(source: FileSource | HubSource, where: str, problem: Problem) -> None:
    answer = f"{source.answer_column} {short(problem.answer)}"
    try:
        if problem.verifier == "reasoning_gym":
            read_metadata(problem.metadata)
        right = verify(problem, problem.answer) == 1.0
    except InputError as error:
        lacks = problem.verifier == "reasoning_gym" and not {"family", "entry"} <= problem.metadata.keys()
        remedy = "; keep the columns family and entry with metadata_columns" if lacks else ""
        raise InputError(f"{where}: {error}{remedy}") from None
    except Exception as error:  # boundary: what another library's scorer raises for fields that it does not expect
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: {answer} cannot be checked by verifier {problem.verifier!r} ({reason})") from None
    if not right:
        raise InputError(
            f"{where}: {answer} is not right by its own verifier {problem.verifier!r}; correct it or choose another "
            "verifier"
        )


def _verifier(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> str:
    name = source.verifier_column
    named = _column(row, name, "verifier_column", where) if name else None
    if named is None or named == "":
        return source.verifier
    if not isinstance(named, str) or named not in VERIFIERS:
        raise InputError(f"{where}: {name}: unknown verifier {short(named)}; known are {', '.join(VERIFIERS)}")
    if named == "none" and source.domain == "reasoning":
        raise InputError(f"{where}: {name}: verifier 'none' is for domain 'general'; name one that checks")
    return named


def _prompt(source: FileSource | HubSource, where: str, row: dict[str, Any]) -> list[Message]:
    name = source.prompt_column
    if name == "prompt" and name not in row:
        name = next((n for n in ("question", "messages") if n in row), name)
    value = _column(row, name, "prompt_column", where)
    messages = read_messages(value, name, where)
    # The last message of the assistant is the answer, not part of the prompt.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{where}: {name} has no message of role user")
    for message in messages:
        read_text(message["content"], name, where)
    return messages


def read_messages(value: Any, name: str, where: str) -> list[Message]:
    """A conversation: a list of {role, content}, or the user's text. Contents are unchanged: see `read_text`."""
    messages = []
    for message in value if isinstance(value, list) else [{"role": "user", "content": value}]:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise InputError(
                f"{where}: {name} holds {short(message)}; a message is {{role, content}} of role system, user or "
                "assistant"
            )
        messages.append({"role": message["role"], "content": message.get("content")})
    return messages


_NO_NUMBER = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_GSM8K = re.compile(r"(?:^|\n)#### *([^\n]+)\s*$")
_ONE_NUMBER = re.compile(r"[^0-9()\[\]{}]*[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?[^0-9,]*")


def _answer(source: FileSource | HubSource, where: str, row: dict[str, Any], verifier: str) -> tuple[str, str]:
    """(reference answer, the worked solution before it or "")."""
    name = source.answer_column
    value = _column(row, name, "answer_column", where)
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = str(value) if numeric else read_text(value, name, where)
    if _NO_NUMBER.fullmatch(text.strip()) and (numeric or verifier in ("number", "math")):
        raise InputError(
            f"{where}: {name} is {text.strip()}, which is no number: mostly a cell that was empty; fill it or remove "
            "the row (infinity as an answer is \\infty, with verifier 'math')"
        )
    if numeric:
        return text, ""
    final, solution = final_answer(text)
    return read_text(final, name, where), solution


def final_answer(text: str) -> tuple[str, str]:
    """(what follows GSM8K's ####, the worked solution before it), or (the whole text, "") if there is no ####. Removes
    GSM8K's <<3+4=7>> marks from the solution."""
    match = _GSM8K.search(text)
    if match is None:
        return text.strip(), ""
    solution = re.sub(r"<<[^>]*>>", "", text[: match.start()]).strip()
    final = match[1].strip()
    if _ONE_NUMBER.fullmatch(final):  # not (1,2), whose comma is none between thousands
        final = final.replace(",", "")
    return final, solution


def _column(row: dict[str, Any], name: str, setting: str, where: str) -> Any:
    if name not in row:
        raise InputError(
            f"{where}: column {name!r} is missing; the columns are {', '.join(map(str, row)) or 'none'}; set {setting}"
        )
    return row[name]


def read_text(value: Any, name: str, where: str) -> str:
    """`value`, if it is non-blank text."""
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} is {short(value)}, a {type(value).__name__}; text is needed")
    if not value.strip():
        raise InputError(f"{where}: {name} is blank; fill it or remove the row")
    _check_text(value, name, where)
    return value


def _json_value(value: Any, name: str, where: str) -> Any:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {name} cannot be kept as metadata: {error}") from None
    _check_text(text, name, where)
    return json.loads(text)


def _check_text(text: str, name: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {name} holds half a surrogate pair, which is no text; write it anew") from None
