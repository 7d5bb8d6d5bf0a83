"""The tokenizer that pretraining makes."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.training.pretrain import TAGS, train_tokenizer

DOCUMENTS = [
    "User: compute 17 + (4 + 8) - 6\nAssistant: first 17 + 12 - 6\nthen 29 - 6\nthen 23\nso the result is 23\n23",
    "User: was weißt du über den fluß\nAssistant: der fluß ist lang, und kühl.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(DOCUMENTS * 50, Pretrain(vocabulary=500, steps=1, optimizer=Optimizer(learning_rate=0.1)))


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [tokenizer.decode([id]) for id in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_a_number_is_the_same_token_wherever_it_stands(tokenizer: Any) -> None:
    assert pieces(tokenizer, "17") == ["17"]
    found = pieces(tokenizer, "then 17 + (17 - 6) - 17\nthen 23")
    assert found == ["then ", "17", " + ", "(", "17", " - ", "6", ")", " - ", "17", "\n", "then ", "23"]
    assert pieces(tokenizer, "is -17 - -6")[-4:] == ["17", " - ", "-", "6"]


def test_words_take_the_space_before_them(tokenizer: Any) -> None:
    assert pieces(tokenizer, "so the result is 23") == ["so", " the", " result", " is ", "23"]
    assert pieces(tokenizer, " fluß ist lang") == [" fluß", " ist", " lang"]


@pytest.mark.parametrize(
    "text", [*DOCUMENTS, "a  b\n\n c", " 1 2  3", "x_1 = (2)!", "÷ 3 €", "12345", f"{TAGS[0]}7{TAGS[1]}"]
)
def test_nothing_is_lost(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
