"""Reads a row of a preference file: which of two responses is better, or whether a response is safe.

The helpful reward model reads only summaries (R1, stage 4), so reasoning is removed from the responses of pairs and
ranked lists. A label applies to the whole response.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo.data.records import Message
from grpo.data.template import parse
from grpo.errors import InputError
from tasks.problems.rows import read_messages, read_text
from tasks.problems.sources import short

Row = dict[str, Any]
ReadText = Callable[[Any, str, str], str]
"""(value, its column, its place) -> the text of a response to be compared."""


@dataclass(frozen=True)
class Said:
    """The judgments in one row about responses to a prompt."""

    messages: list[Message]
    pairs: list[tuple[str, str, float]] = field(default_factory=list)  # chosen, rejected, strength
    labels: list[tuple[str, bool]] = field(default_factory=list)  # response, whether it is safe
    tied: int = 0  # number of pairs with equal rank or equal text


def read_row(row: Row, where: str, *, whole: bool = False) -> Said:
    """Reads a row. `where`: its place ("pairs.jsonl, line 7"), for error messages. `whole`: responses in pairs keep
    their reasoning."""
    present = {name: value for name, value in row.items() if value is not None and value != ""}
    for columns, read in _FORMATS.items():
        if all(name in present for name in columns):
            return read(present, where, read_text if whole else _summary)
    known = "; or ".join(", ".join(columns) for columns in _FORMATS)
    raise InputError(f"{where}: filled columns are {', '.join(map(str, present)) or 'none'}; a row needs {known}")


def _ranked(row: Row, where: str, text: ReadText) -> Said:
    """All pairs with different ranks (InstructGPT, 3.5: ties are dropped)."""
    responses, ranks = _list(row, "responses", where), _list(row, "ranks", where)
    if len(responses) != len(ranks) or len(responses) < 2:
        raise InputError(
            f"{where}: {len(responses)} responses and {len(ranks)} ranks; give two or more responses, a rank for each"
        )
    texts = [text(response, "responses", where) for response in responses]
    places = [_number(rank, "ranks", where) for rank in ranks]
    both = [*itertools.combinations(zip(places, texts, strict=True), 2)]
    pairs = [
        (a, b, 1.0) if place < other else (b, a, 1.0) for (place, a), (other, b) in both if place != other and a != b
    ]
    return Said(_prompt(row, where), pairs=pairs, tied=len(both) - len(pairs))


def _prompted(row: Row, where: str, text: ReadText) -> Said:
    """Reads {prompt, chosen, rejected}. A response that is a conversation may repeat the prompt."""
    prompt = _prompt(row, where)

    def side(name: str) -> str:
        if isinstance(row[name], str):
            return text(row[name], name, where)
        before, response = _conversation(row, name, where, text)
        if before and before != prompt:
            raise InputError(f"{where}: {name} begins otherwise than prompt; leave prompt out, or the messages before")
        return response

    return _pair(row, prompt, side("chosen"), side("rejected"), where)


def _conversations(row: Row, where: str, text: ReadText) -> Said:
    """Reads {chosen, rejected}: the messages before the last one, which both share, are the prompt."""
    (prompt, chosen), (other, rejected) = (_conversation(row, name, where, text) for name in ("chosen", "rejected"))
    if prompt != other:
        raise InputError(f"{where}: chosen and rejected differ before the last message; only that may be another")
    return _pair(row, _checked_prompt(prompt, "chosen", where), chosen, rejected, where)


def _labelled(row: Row, where: str, text: ReadText) -> Said:
    label = row["label"]
    known = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(known, (str, bool, int, float)) or known not in _LABELS:
        raise InputError(f'{where}: label is {short(label)}; give true, 1 or "safe", or false, 0 or "unsafe"')
    name = "response" if "response" in row else "completion"
    if isinstance(row[name], str):
        return Said(_prompt(row, where), labels=[(read_text(row[name], name, where), _LABELS[known])])
    *before, last = _turns(row, name, where)
    if before:
        raise InputError(f"{where}: {name} has {len(before) + 1} messages; give the last alone, the others in prompt")
    return Said(_prompt(row, where), labels=[(read_text(last["content"], name, where), _LABELS[known])])


_FORMATS: dict[tuple[str, ...], Callable[[Row, str, ReadText], Said]] = {
    ("prompt", "responses", "ranks"): _ranked,
    ("prompt", "response", "label"): _labelled,
    ("prompt", "completion", "label"): _labelled,
    ("prompt", "chosen", "rejected"): _prompted,
    ("chosen", "rejected"): _conversations,
}
"""The columns of each format. A row has the first format whose columns it contains."""
_LABELS: dict[Any, bool] = {1: True, 0: False} | {
    word: safe for safe, words in ((True, ("safe", "true", "1")), (False, ("unsafe", "false", "0"))) for word in words
}
"""Label values; CSV has only text. True and 1 are the same key."""


def _pair(row: Row, prompt: list[Message], chosen: str, rejected: str, where: str) -> Said:
    if chosen == rejected:
        raise InputError(f"{where}: chosen and rejected have the same summary {short(chosen)}; remove the row")
    strength = _number(row.get("strength", 1.0), "strength", where)
    if strength < 0:
        raise InputError(f"{where}: strength is {strength:g}; it is 0 or more, and chosen is the better response")
    return Said(prompt, pairs=[(chosen, rejected, strength)])


def _prompt(row: Row, where: str) -> list[Message]:
    return _checked_prompt(read_messages(row["prompt"], "prompt", where), "prompt", where)


def _checked_prompt(messages: list[Message], name: str, where: str) -> list[Message]:
    for message in messages:
        read_text(message["content"], name, where)
    if not messages or messages[-1]["role"] != "user":
        raise InputError(f"{where}: {name} must have a message of role user right before the response")
    return messages


def _conversation(row: Row, name: str, where: str, text: ReadText) -> tuple[list[Message], str]:
    """(messages before the last one, summary of the last one, which must be the assistant's)."""
    *before, last = _turns(row, name, where)
    return before, text(last["content"], name, where)


def _turns(row: Row, name: str, where: str) -> list[Message]:
    """A conversation that ends with a message of the assistant."""
    turns = read_messages(_list(row, name, where), name, where)
    if not turns or turns[-1]["role"] != "assistant":
        raise InputError(f"{where}: {name} must end with a message of role assistant")
    return turns


def _summary(response: Any, name: str, where: str) -> str:
    summary = parse(read_text(response, name, where), "auto").summary
    if not summary:
        raise InputError(f"{where}: {name} has nothing after its reasoning; the summary is what is compared")
    return summary


def _list(row: Row, name: str, where: str) -> list[Any]:
    value = row[name]
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InputError(f"{where}: {name} begins as a list but is not JSON: {short(value)}") from None
    if not isinstance(value, list):
        hint = "; with text give the column prompt too" if name in ("chosen", "rejected") else ""
        raise InputError(f"{where}: {name} is {short(value)}, a {type(value).__name__}; a list is needed{hint}")
    return value


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where}: {name} holds {short(value)}; a number is needed")
    return number
