"""The tokens that end steps, against a decoding of every beginning, and the work that it takes to find them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grpo.rl.step_tokens import step_tokens


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def batch_decode(self, rows: list[list[int]], **options: Any) -> list[str]:
        self.decoded += sum(map(len, rows))
        return self.tokenizer.batch_decode(rows, **options)


def by_every_beginning(tokenizer: Any, tokens: list[int], end: int) -> int:
    for last in range(len(tokens)):
        if len(tokenizer.decode(tokens[: last + 1], skip_special_tokens=True).rstrip("\ufffd")) >= end:
            return last
    return len(tokens) - 1


def test_a_step_ends_with_the_token_that_completes_its_last_character(tokenizer):
    text = "add 1\n4 \N{MULTIPLICATION SIGN} 2 \N{GRINNING FACE}\nso \u516b"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = [i for i, character in enumerate(text) if character == "\n"] + [len(text)]
    found = step_tokens(tokenizer, tokens, ends)
    # The tokenizer of the tests knows no emoji: it is four tokens, of which the last one ends the step.
    assert [tokenizer.decode(tokens[: last + 1]) for last in found] == [text[:end] for end in ends]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_decoding_every_beginning_gives(seed, tokenizer):
    rng = random.Random(seed)
    words = ["carry", "1 + 2 = 3", "\u5341\u4e8c", "\N{GRINNING FACE}", "\u00e9", "\n", "  ", "</think>"]
    text = " ".join(rng.choice(words) for _ in range(120))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = [token for token in tokens if rng.random() > 0.02]  # broken characters, as a model may write them
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    ends = sorted(rng.sample(range(1, len(whole) + 1), 20))
    assert step_tokens(tokenizer, tokens, ends) == [by_every_beginning(tokenizer, tokens, end) for end in ends]


def test_no_steps_and_a_single_token(tokenizer):
    assert step_tokens(tokenizer, [5], []) == []
    assert step_tokens(tokenizer, [tokenizer.eos_token_id], [3]) == [0]  # beyond all text: the last token


def test_work_is_linear_in_the_completion(tokenizer):
    counts = []
    for lines in (100, 200, 400):
        text = "add one more\n" * lines
        counting = Counting(tokenizer)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        step_tokens(counting, tokens, [13 * line + 12 for line in range(lines)])
        assert counting.decoded < 41 * len(tokens)  # 8 of context and 32 of a block, at most, for each token
        counts.append(counting.decoded)
    assert counts[2] / counts[1] == pytest.approx(2, rel=0.02) == pytest.approx(counts[1] / counts[0], rel=0.04)
