"""The tokens that end completions as text: the tokenizer's, and those that the model's folder names besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.data.completions import TextCompletion
from grpo.data.records import Problem
from grpo.data.template import prompt_tokens
from grpo.errors import InputError
from grpo.generation import text_engines
from grpo.generation.continuous_batching import sample_continuously
from grpo.generation.sampler import sample
from grpo.generation.text_engines import Prompting, make_text_engine
from grpo.generation.vllm.request import parameters
from grpo.model.loading import load_policy, load_tokenizer

SAMPLING = Sampling(max_new_tokens=24)
PROBLEM = Problem("p", [{"role": "user", "content": "hello"}], "", "none", "reasoning", "en", "test")
PROMPTING = Prompting("chat", None)


@pytest.fixture(scope="module")
def completions(model_folder: str) -> list[list[int]]:
    """What the model's own sampler draws, up to the tokenizer's end token."""
    tokenizer, policy = load_tokenizer(model_folder), load_policy(model_folder, Hardware(device="cpu"))
    prompt = prompt_tokens(tokenizer, PROBLEM.messages, "chat")
    (group,) = sample(policy, [prompt], 6, SAMPLING, eos_id=tokenizer.eos_token_id, seeds=[7])
    return [completion.tokens for completion in group]


@pytest.fixture(scope="module")
def turn_end(completions: list[list[int]]) -> int:
    """A token that is not the tokenizer's end token, and in most completions."""
    inner = [set(tokens[:-1]) for tokens in completions]
    return max(set.union(*inner), key=lambda token: (sum(token in tokens for tokens in inner), token))


def named(folder: str, place: Path, ends: Any) -> str:
    """A copy of a model folder whose generation_config.json names `ends`."""
    copied = Path(shutil.copytree(folder, place))
    path = copied / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    return str(copied)


def written(model: str, **hardware: Any) -> list[TextCompletion]:
    engine = make_text_engine(None, model, PROMPTING, Hardware(device="cpu", **hardware))
    ((_, group),) = engine.write([PROBLEM], 6, SAMPLING, [7])
    return group.texts


@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_the_own_sampler_ends_at_a_token_that_the_folder_names(
    attention: str, model_folder: str, completions: list[list[int]], turn_end: int, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(model_folder)
    model = named(model_folder, tmp_path / "model", [tokenizer.eos_token_id, turn_end])
    found, earlier = written(model, attention=attention), 0
    for completion, tokens in zip(found, completions, strict=True):
        if turn_end in tokens:
            tokens = tokens[: tokens.index(turn_end) + 1]
            assert completion.finished
            assert completion.text == tokenizer.decode(tokens[:-1], skip_special_tokens=True)
            earlier += 1
        assert completion.tokens == len(tokens)
    assert earlier >= 3


def test_continuous_batching_ends_at_any_of_several(model_folder: str) -> None:
    policy, ends = load_policy(model_folder, Hardware(device="cpu")), frozenset(range(100, 200))
    ((_, group),) = sample_continuously(policy, [[5, 6, 7]], 6, SAMPLING, eos_id=ends, seeds=[7], logprobs=False)
    assert sum(completion.finished for completion in group) >= 3
    for completion in group:
        assert completion.finished == (completion.tokens[-1] in ends)
        assert not ends & {*completion.tokens[:-1]}


@pytest.mark.parametrize("kind", ["local", "server"])
def test_vllm_is_told_of_it(
    kind: Any, model_folder: str, turn_end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    class Engine:
        sends = False

        def __init__(self, model: str, settings: VLLM, **options: Any) -> None:
            told.update(options)

        def update(self, *_: Any, **__: Any) -> None: ...
        def sample(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(text_engines, "LocalVLLM" if kind == "local" else "ServerVLLM", Engine)
    monkeypatch.setattr(text_engines, "_version", lambda *_: "0")
    eos = load_tokenizer(model_folder).eos_token_id
    settings = VLLM(kind=kind, **({"url": "http://localhost:1"} if kind == "server" else {}))
    for number, ends in enumerate([eos, [turn_end], [eos, turn_end]]):
        model = named(model_folder, tmp_path / str(number), ends)
        make_text_engine(settings, model, PROMPTING, Hardware(device="cpu"))
        expected = [eos] if number == 0 else sorted([eos, turn_end])
        assert parameters(1, SAMPLING, told["eos_id"], 5, False)["stop_token_ids"] == expected


def test_a_folder_that_names_no_other_samples_as_before(
    model_folder: str, completions: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(model_folder, tmp_path / "silent", ignore=shutil.ignore_patterns("generation_config.json"))
    tokenizer = load_tokenizer(model_folder)
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    for model in (model_folder, str(tmp_path / "silent")):
        found = written(model)
        assert [c.text for c in found] == expected
        assert [c.tokens for c in found] == [len(tokens) for tokens in completions]


def test_generation_settings_that_cannot_be_read(model_folder: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    (model / "generation_config.json").write_text("{")
    with pytest.raises(
        InputError, match=r"generation_config\.json cannot be read \(.*\); correct or remove it"
    ) as caught:
        written(str(model))
    assert "\n" not in str(caught.value)
