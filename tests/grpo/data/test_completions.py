"""Completions as text: end tokens, special tokens and tags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig

from grpo.data.completions import Completion, TextCompletion, all_ends, completion_texts, decode
from grpo.data.records import Problem
from grpo.data.template import render
from grpo.generation.text_engines import TokenEngine
from grpo.model.loading import load_tokenizer
from grpo.rl.step_tokens import step_tokens
from grpo.sampling.journal import Journal
from grpo.scoring.scorer import responses_of

TEXT = render("add 1 and 2", "3")
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PROBLEM = Problem("p", [{"role": "user", "content": "1 + 2?"}], "3", "number", "reasoning", "en", "test")


@pytest.mark.parametrize(("text", "stored"), [("a\ud83d b", "a? b"), ("\ude00", "?"), ("a \U0001f600", "a \U0001f600")])
def test_half_a_surrogate_pair_of_any_engine_can_be_stored(text: str, stored: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "shard.journal")
    journal.append([TextCompletion(text, 3, True).text])
    assert journal.lines() == [[stored]]
    journal.close()


NAMED = {"extra_special_tokens": TAGS}
WAYS: dict[str, Any] = {
    "text": lambda tokenizer: None,
    "added tokens": lambda tokenizer: tokenizer.add_tokens(TAGS),
    "special tokens": lambda tokenizer: tokenizer.add_special_tokens(NAMED),
    "special only in its own file": lambda tokenizer: tokenizer.add_tokens([AddedToken(t, special=True) for t in TAGS]),
}
"""How a tokenizer may hold the tags of a completion."""


@pytest.fixture(params=WAYS)
def tagged(request: pytest.FixtureRequest, model_folder: str) -> Any:
    tokenizer = load_tokenizer(model_folder)
    WAYS[request.param](tokenizer)
    return tokenizer


def completion(tokenizer: Any, text: str = TEXT) -> Completion:
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Completion(tokens, [0.0] * len(tokens), True)


def test_tags_stay_in_the_text_and_other_special_tokens_do_not(tagged: Any) -> None:
    sampled = completion(tagged)
    assert completion_texts(tagged, [sampled]) == [TEXT]
    inside = [tagged.bos_token_id, *sampled.tokens[:3], tagged.pad_token_id, *sampled.tokens[3:], tagged.pad_token_id]
    assert decode(tagged, [inside]) == [TEXT]


def test_whatever_reads_a_completion_reads_its_tags(tagged: Any) -> None:
    sampled = completion(tagged)
    (response,) = responses_of(tagged, PROBLEM, [5, 6], [sampled], 99)
    assert response.parts.well_formed and response.parts.answer == "3"
    engine = TokenEngine.__new__(TokenEngine)
    engine._tokenizer = tagged
    assert [written.text for written in engine._written([sampled], [5, 6]).texts] == [TEXT]
    end = TEXT.index("2") + 1
    (last,) = step_tokens(tagged, sampled.tokens, [end])
    assert decode(tagged, [sampled.tokens[: last + 1]])[0].endswith("2")


def test_a_text_without_tags_that_are_special_is_as_before(model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.add_tokens(TAGS[:2])
    rows = [[*range(len(tokenizer))], [*range(40, 90), tokenizer.eos_token_id], []]
    assert decode(tokenizer, rows) == tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_an_end_token_that_is_not_special_is_no_text(model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.add_tokens(["<end_of_turn>"])
    tokens = tokenizer("add 3<end_of_turn>", add_special_tokens=False)["input_ids"]
    assert completion_texts(tokenizer, [Completion(tokens, [], True)]) == ["add 3"]
    assert completion_texts(tokenizer, [Completion(tokens, [], False)]) == ["add 3<end_of_turn>"]


@pytest.mark.parametrize(("named", "ends"), [(None, {2}), (7, {2, 7}), ([7, 2], {2, 7}), ([2], {2}), ([], {2})])
def test_the_tokens_that_end_a_completion(named: Any, ends: set[int], model_folder: str) -> None:
    tokenizer = load_tokenizer(model_folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    assert all_ends(tokenizer, GenerationConfig(eos_token_id=named)) == ends
    assert all_ends(tokenizer, None) == {2}
