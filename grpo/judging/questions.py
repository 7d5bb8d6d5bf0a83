"""A judge's prompts, read from files and filled with untrusted texts.

Every judged text comes from a model that is rewarded for the verdict. It must not close its own tag in order to
continue as the judge, nor contain chat-template markers, which a tokenizer reads as the end of the message.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from grpo.data.records import Message

_PROMPTS = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "prompts").glob("*.txt"))}

DIGESTS = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in _PROMPTS.items()}
"""SHA-256 of each prompt file, because different wording gives different results."""

_NAMES = sorted({name for text in _PROMPTS.values() for name in re.findall(r"^<(\w+)>$", text, re.MULTILINE)})
# Possessive, because two runs of spaces that can share one take quadratic time.
_TAG = re.compile(rf"[<＜]\s*+(?:[/／]\s*+)?(?:{'|'.join(_NAMES)})\s*+[>＞]", re.IGNORECASE)
_INVISIBLE = re.compile(r"(?<=[!-~])[\u00ad\u200b-\u200f\u2060\ufeff]+(?=[!-~])")
"""Zero-width characters between two ASCII characters: they hide a tag from the pattern, but not from a model."""
_MARKER = re.compile(
    r"<(?=[|｜])"  # <|im_end|>, <|eot_id|>, <｜User｜>
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|sep|cls)>)"
    r"|<(?=/?think>)"  # quoted in a reply, it would end the judge's reasoning
    r"|<(?=/?\w+_\w*>)"  # <end_of_turn>, <extra_id_0>, <BOS_TOKEN>
    r"|<(?=<\s*/?SYS>>)"
    r"|\[(?=/?(?-i:[A-Z][A-Z_]+)\])",  # [INST], [/INST], [TOOL_CALLS], [SEP]
    re.IGNORECASE,
)
"""Start of the markers of common chat templates."""
_ROLE = re.compile(r"\[(?=(?:system|user|assistant)\])", re.IGNORECASE)
"""Start of the marks that `question_of` puts before messages."""


def prompt(name: str, **values: str) -> str:
    """The prompt file `name` with its placeholders filled in one pass, so that "$reference" inside an answer is kept as
    is."""
    return Template(_PROMPTS[name]).substitute({key: harmless(value) for key, value in values.items()})


def question_of(messages: Sequence[Message]) -> str:
    """What a model was asked, for a judge: the user's message if it stands alone, else all messages, each after its
    role in brackets. A text cannot pretend to be another message, because such marks in it are broken by a space."""
    if [message["role"] for message in messages] == ["user"]:
        return messages[0]["content"]
    # Made harmless first: this removes invisible characters, which could hide a mark.
    texts = (_ROLE.sub("[ ", harmless(message["content"])) for message in messages)
    return "\n\n".join(f"[{m['role']}]\n{text}" for m, text in zip(messages, texts, strict=True))


def harmless(text: str) -> str:
    """The text without the tags of our prompts, and with common template markers broken by a space.

    Lone surrogates, to which some tokenizers decode, cannot be sent and become "?".
    """
    text = _TAG.sub("[tag]", _INVISIBLE.sub("", text))
    return _MARKER.sub(lambda match: f"{match[0]} ", text).encode("utf-8", "replace").decode()


def without_markers(text: str, markers: Iterable[str]) -> str:
    """The text with each of a tokenizer's `markers` broken by a space. Some tokenizers normalise text (NFKC), so
    markers that appear only after normalisation are broken, too."""
    markers = [marker for marker in markers if len(marker) > 1 and not any(c.isspace() for c in marker)]
    if any(marker in unicodedata.normalize("NFKC", text) and marker not in text for marker in markers):
        text = unicodedata.normalize("NFKC", text)
    # Markers contain no space, so a break cannot create another marker.
    while found := next((marker for marker in markers if marker in text), None):
        text = text.replace(found, f"{found[0]} {found[1:]}")
    return text
