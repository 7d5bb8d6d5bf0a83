"""Preference data as batch elements: a prompt with all its pairs, or one labelled response."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.data.conversations import read_rows_of
from grpo.data.examples import Example, compact
from grpo.data.records import Message
from grpo.model.packed.packing import shared_prefix
from grpo.scoring.reward_model import conversation_tokens, up_to_scored

COLUMNS = {"pairs": ("messages", "chosen", "rejected"), "points": ("messages", "response", "label")}
OPTIONAL = ("strength", "source")

Row = dict[str, Any]


@dataclass(frozen=True)
class Preferences(Example):
    """A batch element and its data rows: all pairs of a prompt, or one labelled response."""

    rows: tuple[Row, ...] = ()
    chosen: tuple[int, ...] = ()  # index of the better sequence of each pair
    rejected: tuple[int, ...] = ()


def read_preferences(path: Path, loss: str) -> tuple[list[Row], list[Row]]:
    """Returns (training rows, held-out rows)."""
    rows = read_rows_of(path, (*COLUMNS[loss], "held_out"), OPTIONAL)
    return [row for row in rows if not row["held_out"]], [row for row in rows if row["held_out"]]


def elements(tokenizer: Any, rows: Sequence[Row], loss: str, max_tokens: int) -> list[Preferences]:
    """Batch elements in the order of their first rows. Omits sequences longer than `max_tokens`, and pairs that contain
    one."""
    by_prompt: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_prompt[json.dumps(row["messages"])].append(row)
    elements_of_prompts = [_ELEMENTS[loss](tokenizer, of_prompt, max_tokens) for of_prompt in by_prompt.values()]
    return [element for of_prompt in elements_of_prompts for element in of_prompt]


def bootstrap(examples: Sequence[Preferences], seed: int) -> list[Preferences]:
    """A bootstrap sample: the same number of prompts, drawn with replacement, each with all its rows."""
    by_prompt: dict[str, list[Preferences]] = defaultdict(list)
    for example in examples:
        by_prompt[json.dumps(example.rows[0]["messages"])].append(example)
    drawn = random.Random(f"bootstrap/{seed}").choices([*by_prompt.values()], k=len(by_prompt))
    return [example for of_prompt in drawn for example in of_prompt]


def _pairs(tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> list[Preferences]:
    """All pairs of a prompt as one element (InstructGPT, 3.5), so that each response is scored once and a prompt with
    more comparisons does not count more. Returns at most one element."""
    texts = dict.fromkeys(row[side] for row in rows for side in ("chosen", "rejected"))
    tokens = {text: _sequence(tokenizer, rows[0]["messages"], text) for text in texts}
    fits = [row for row in rows if max(len(tokens[row[side]]) for side in ("chosen", "rejected")) <= max_tokens]
    if not fits:
        return []
    scored = [*dict.fromkeys(row[side] for row in fits for side in ("chosen", "rejected"))]
    number = {text: i for i, text in enumerate(scored)}
    sequences = [tokens[text] for text in scored]
    shared = shared_prefix(sequences)
    return [
        Preferences(
            prompts=[compact(sequence[:shared]) for sequence in sequences],
            rests=[compact(sequence[shared:]) for sequence in sequences],
            weight=1,
            rows=tuple(fits),
            chosen=tuple(number[row["chosen"]] for row in fits),
            rejected=tuple(number[row["rejected"]] for row in fits),
        )
    ]


def _points(tokenizer: Any, rows: Sequence[Row], max_tokens: int) -> list[Preferences]:
    sequences = ((row, _sequence(tokenizer, row["messages"], row["response"])) for row in rows)
    return [
        Preferences([compact(ids[:1])], [compact(ids[1:])], weight=1, label=float(row["label"]), rows=(row,))
        for row, ids in sequences
        if len(ids) <= max_tokens
    ]


def _sequence(tokenizer: Any, messages: list[Message], response: str) -> Sequence[int]:
    # The trained model has the tokenizer's padding token in its config.
    return up_to_scored(conversation_tokens(tokenizer, messages, response), tokenizer.pad_token_id)


_ELEMENTS: dict[str, Callable[[Any, Sequence[Row], int], list[Preferences]]] = {"pairs": _pairs, "points": _points}
