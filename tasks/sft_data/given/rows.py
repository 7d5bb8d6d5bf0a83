"""Reads a row of a mix source: the prompt's messages and the completion, whatever the columns are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from grpo.data.records import Message
from grpo.errors import InputError
from tasks.paths import expanded
from tasks.problems.files import Row, dataset_rows, file_rows
from tasks.problems.rows import final_answer, read_messages, read_text
from tasks.problems.sources import short
from tasks.sft_data.given.settings import MixSource

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
"""Speaker names of ShareGPT and the usual role names -> role."""
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "output"))
_CONVERSATIONS = ("messages", "conversations")


def source_rows(source: MixSource) -> Iterator[Row]:
    """The raw rows of a source with their places, streamed. Raises InputError if there are none."""
    if source.path is not None and not expanded(source.path).is_dir():
        rows = file_rows(expanded(source.path))
    else:
        rows = dataset_rows(str(source.place), source.config, source.split)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.place}: there are no rows; mix source {source.name!r} needs some")
    return itertools.islice(itertools.chain([first], rows), source.limit)


def read_example(source: MixSource, row: dict[str, Any], where: str) -> tuple[list[Message], str, str]:
    """(messages of the prompt, completion, reference answer or ""). In a conversation, the completion is the last
    turn."""
    answer = "" if source.answer_column is None else _answer(row, source.answer_column, where)
    if source.prompt_column is not None and source.completion_column is not None:
        return *_pair(row, source.prompt_column, source.completion_column, where), answer
    if name := next((name for name in _CONVERSATIONS if row.get(name) is not None), None):
        turns = _turns(row[name], name, where)
        if not turns or turns[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with a message of role assistant, which is what is learnt")
        return _prompt(turns[:-1], name, where), read_text(turns[-1]["content"], name, where), answer
    if names := next((pair for pair in _PAIRS if pair[0] in row and pair[1] in row), None):
        return *_pair(row, *names, where), answer
    raise InputError(
        f"{where}: columns are {', '.join(map(str, row)) or 'none'}; a row needs messages, conversations, or prompt "
        "and completion; set prompt_column and completion_column"
    )


def _pair(row: dict[str, Any], prompt: str, completion: str, where: str) -> tuple[list[Message], str]:
    turns = _turns(_column(row, prompt, "prompt_column", where), prompt, where)
    said = _column(row, completion, "completion_column", where)
    if isinstance(said, list):
        spoken = _turns(said, completion, where)
        if len(spoken) != 1 or spoken[0]["role"] != "assistant":
            raise InputError(f"{where}: {completion} has {len(spoken)} messages; give one of role assistant")
        said = spoken[0]["content"]
    return _prompt(turns, prompt, where), read_text(said, completion, where)


def _column(row: dict[str, Any], name: str, setting: str, where: str) -> Any:
    if name not in row:
        raise InputError(
            f"{where}: column {name!r} is missing; the columns are {', '.join(map(str, row)) or 'none'}; set {setting}"
        )
    return row[name]


def _turns(value: Any, name: str, where: str) -> list[Message]:
    """Messages from {role, content}, from ShareGPT's {from, value}, or from the user's text."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]:
        unknown = next((turn for turn in value if _ROLES.get(str(turn.get("from"))) is None), None)
        if unknown is not None:
            raise InputError(f"{where}: {name} holds {short(unknown)}; `from` is human, gpt or system")
        value = [{"role": _ROLES[turn["from"]], "content": turn.get("value")} for turn in value]
    return read_messages(value, name, where)


def _prompt(turns: list[Message], name: str, where: str) -> list[Message]:
    for turn in turns:
        read_text(turn["content"], name, where)
    if not turns or turns[-1]["role"] != "user":
        raise InputError(f"{where}: {name} must have a message of role user right before the response")
    return turns


def _answer(row: dict[str, Any], name: str, where: str) -> str:
    value = _column(row, name, "answer_column", where)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return read_text(final_answer(read_text(value, name, where))[0], name, where)
