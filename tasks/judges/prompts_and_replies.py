"""Prompts of a judge, from files, and the verdicts in its replies.

A model's reply is untrusted: anything but exactly the requested JSON is no verdict.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, Generic, NamedTuple, TypeVar

from grpo.data.records import Message

T = TypeVar("T")

_PROMPTS = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "prompts").glob("*.txt"))}

_DIGESTS = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in _PROMPTS.items()}
PROMPT_DIGESTS = {name: _DIGESTS[name] for name in ("compare", "correct", "quality", "safe")}
"""SHA-256 of each prompt file, part of the key of stages that make data: another wording gives other results."""
EVALUATION_DIGESTS = {name: _DIGESTS[name] for name in ("compare", "refused")}
"""Prompts that an evaluation uses."""

_TAG = re.compile(r"</?\s*(?:question|reference_answer|answer_to_check|prompt|response(?:_[ab])?)\s*>", re.IGNORECASE)
_MARK = re.compile(r"<(?=[|｜])")


def prompt(name: str, **values: str) -> str:
    """The prompt file `name` with its places filled, in one pass: "$reference" inside an answer stays what it is.

    No value may close its own tag, to go on in the judge's voice, nor hold a chat template's marks, <|like this|>,
    which a tokenizer would read as the end of the message. Half a surrogate pair, which some tokenizers decode to,
    cannot be sent.
    """
    return Template(_PROMPTS[name]).substitute({key: _harmless(value) for key, value in values.items()})


def _harmless(text: str) -> str:
    return _MARK.sub("< ", _TAG.sub("[tag]", text)).encode("utf-8", "replace").decode()


class Reply(NamedTuple):
    """A model's words. `cut`: it ran into the token limit. `missing`: why there are none, a kind of
    `judge_counts.UNDECIDED`."""

    text: str
    cut: bool = False
    missing: str = ""


class Reading(NamedTuple, Generic[T]):
    """The verdict in a reply, or None, and the outcome by the names of `judge_counts`."""

    verdict: T | None
    outcome: str


def read(reply: Reply, key: str, verdicts: Mapping[str, T]) -> Reading[T]:
    """The reply must be one object with "analysis" and `key` and nothing else; reasoning up to </think> is no part.

    One repair: the object may stand inside other text (the first that opens counts).
    """
    if reply.missing:
        return Reading(None, reply.missing)
    text = answer_of(reply.text)
    value, outcome = _object(text), "decided"
    if value is None and "{" in text:
        value, outcome = _object(text[text.index("{") :], and_more=True), "in_text"
    fault = _fault(text, value, key, verdicts)
    if fault is None:
        assert value is not None
        return Reading(verdicts[value[key]], outcome)
    return Reading(None, "too_long" if reply.cut else fault)


def answer_of(text: str) -> str:
    """The text after a reply's reasoning; empty if the reasoning does not end."""
    _, end, after = text.rpartition("</think>")
    return "" if not end and after.lstrip().startswith("<think>") else after.strip()


def _fault(text: str, value: Any, key: str, verdicts: Mapping[str, Any]) -> str | None:
    if not text:
        return "empty"
    if not isinstance(value, dict):
        return "no_json"
    if value.keys() != {"analysis", key} or not isinstance(value["analysis"], str):
        return "wrong_keys"
    return None if isinstance(value[key], str) and value[key] in verdicts else "wrong_verdict"


def _object(text: str, and_more: bool = False) -> Any:
    decoder = json.JSONDecoder(object_pairs_hook=_no_key_twice)
    try:
        return decoder.raw_decode(text)[0] if and_more else decoder.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # {"correctness": "incorrect", "correctness": "correct"}: no verdict, so neither key is left.
    return dict(pairs) if len(dict(pairs)) == len(pairs) else {}


ASK_AGAIN = {
    "no_json": "it holds no JSON object that can be read; mind quotation marks and backslashes inside strings",
    "wrong_keys": "the object must have exactly the two keys asked for, with a text for each",
    "wrong_verdict": "its verdict is not one of the words asked for",
    "too_long": "it was cut off because it became too long; keep the analysis to a sentence or two",
}
"""What the model is told about an unreadable reply, by the reply's outcome."""


def again(dialogue: list[Message], reply: Reply, outcome: str) -> list[Message]:
    """The dialogue, followed by the reply without its reasoning and by what is wrong with it."""
    complaint = f"Your reply cannot be used: {ASK_AGAIN[outcome]}. Reply again, with the JSON object and nothing else."
    turn = {"role": "assistant", "content": _harmless(answer_of(reply.text)) or "(no reply)"}
    return [*dialogue, turn, {"role": "user", "content": complaint}]
