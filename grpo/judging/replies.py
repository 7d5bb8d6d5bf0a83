"""Reads the verdict in a judge's reply.

A reply is untrusted: it may quote a verdict that the judged text forged. Only exactly the requested JSON, or several
objects with the same verdict, counts as a verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from grpo.data.records import Message
from grpo.judging.questions import harmless

T = TypeVar("T")
MAX_OBJECTS = 20
"""Maximum number of objects in a reply. With more there is no verdict, because checking whether an object is quoted
takes time proportional to the length of the reply."""


class Reply(NamedTuple):
    """A model's reply. `cut`: whether it reached the token limit. `missing`: why there is no text, a kind of
    `counts.UNDECIDED`. `tokens`: those of prompt and reply, as the engine counts them."""

    text: str
    cut: bool = False
    missing: str = ""
    tokens: int = 0


class Reading(NamedTuple, Generic[T]):
    """The verdict in a reply, or None; the outcome, named as in `grpo.judging.counts`; and the judge's reason."""

    verdict: T | None
    outcome: str
    reason: str = ""


def read(reply: Reply, key: str, verdicts: Mapping[str, T]) -> Reading[T]:
    """Reads a verdict. The reply must be one object with exactly "analysis" and `key`; reasoning before it, up to
    </think>, is ignored.

    One repair: the object may stand inside other text. If there are several, those in quotation marks do not count,
    and the others must agree. A brace that opens no readable object means no verdict, because it may be the judge's own
    object. A reply that was cut off is not repaired: what it holds may be a draft inside reasoning that the prompt
    opened.
    """
    if reply.missing:
        return Reading(None, reply.missing)
    text = answer_of(reply.text)
    # All of the reply first: an analysis may quote </think>.
    whole = _whole(reply.text.strip()) or _whole(text)
    if reply.cut and not whole:
        return Reading(None, "too_long")
    values, outcome = (whole, "decided") if whole else (_unquoted(text), "in_text")
    faults = [_fault(value, key, verdicts) for value in values] or ["no_json" if text else "empty"]
    if fault := next((fault for fault in faults if fault), None):
        return Reading(None, "too_long" if reply.cut else fault)
    if len({value[key] for value in values}) > 1:
        return Reading(None, "contradictory")
    return Reading(verdicts[values[-1][key]], outcome, values[-1]["analysis"])


def answer_of(text: str) -> str:
    """The text after a reply's reasoning; empty if the reasoning is not closed."""
    _, end, after = text.rpartition("</think>")
    return "" if not end and after.lstrip().startswith("<think>") else after.strip()


def _fault(value: Any, key: str, verdicts: Mapping[str, Any]) -> str | None:
    if not isinstance(value, dict):
        return "no_json"
    if value.keys() != {"analysis", key} or not isinstance(value["analysis"], str):
        return "wrong_keys"
    return None if isinstance(value[key], str) and value[key] in verdicts else "wrong_verdict"


def _unquoted(text: str) -> list[Any]:
    """The objects outside quotation marks, in order; None for a brace that opens no object."""
    return [value for value, before, after in _objects(text) if value is None or not _is_quoted(before, after)]


def _objects(text: str) -> Iterator[tuple[Any, str, str]]:
    """Yields each object with the text before it (without earlier objects) and the text after it. Ends with None at a
    brace that opens no object, or if there are more than MAX_OBJECTS."""
    before, end, count = "", 0, 0
    while (start := text.find("{", end)) >= 0:
        before += text[end:start]
        count += 1
        if count > MAX_OBJECTS or (found := _object(text, start)) is None:
            yield None, before, ""
            return
        value, end = found
        yield value, before, text[end:]


_OPEN, _CLOSE = "\"'`“‘«„‚‹『「", "\"'`”’»“‘›』」"


def _is_quoted(before: str, after: str) -> bool:
    before, after = before.replace("```", "\n"), after.replace("```", "\n")  # models often put their reply in a fence
    if before.rstrip(" ")[-1:] in set(_OPEN) or after.lstrip(" ")[:1] in set(_CLOSE):
        return True
    # Inside a longer quotation, or in a line that quotes as Markdown does.
    pairs = [before.count(a) > before.count(b) for a, b in ("“”", "«»", "„“", "『』", "「」")]
    odd = [before.count(mark) % 2 == 1 for mark in '"`']
    return any(pairs) or any(odd) or re.match(r"\s*>", before.rpartition("\n")[2]) is not None


def _object(text: str, start: int = 0) -> tuple[Any, int] | None:
    """The JSON value that begins at `start`, and where it ends."""
    try:
        return json.JSONDecoder(object_pairs_hook=_no_key_twice).raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _whole(text: str) -> list[Any]:
    """The JSON value that all of the text is; empty if it is none."""
    found = _object(text)
    return [found[0]] if found and found[1] == len(text) else []


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # {"correctness": "incorrect", "correctness": "correct"} is no verdict, so all keys are dropped.
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {}


ASK_AGAIN = {
    "no_json": "it holds no JSON object that can be read; mind quotation marks and backslashes inside strings",
    "wrong_keys": "the object must have exactly the two keys asked for, with a text for each",
    "wrong_verdict": "its verdict is not one of the words asked for",
    "contradictory": "it holds several verdicts that differ",
    "too_long": "it was cut off because it became too long; keep the analysis to a sentence or two",
}
"""Outcome of an unreadable reply -> the message that asks again."""


def again(dialogue: list[Message], reply: Reply, outcome: str) -> list[Message]:
    """The dialogue, followed by the reply without its reasoning and a message that says what is wrong with it."""
    complaint = f"Your reply cannot be used: {ASK_AGAIN[outcome]}. Reply again, with the JSON object and nothing else."
    turn = {"role": "assistant", "content": harmless(answer_of(reply.text)) or "(no reply)"}
    return [*dialogue, turn, {"role": "user", "content": complaint}]
