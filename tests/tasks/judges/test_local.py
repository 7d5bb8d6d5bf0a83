"""A real model of transformers as the judge: one with random weights, and, slow, SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.judging.questions import prompt
from grpo.judging.replies import answer_of
from tasks.judges.base import Claim
from tasks.judges.create_judge import make_judge
from tests.support.injections import INJECTIONS, MARKERS

GREETING = Problem("p", [{"role": "user", "content": "Say hello."}], "", "none", "general", "en", "test")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("judge")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(["<eos>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def judge_of(folder: Path, **settings: Any) -> Any:
    return make_judge(JudgeSettings(kind="local", path=folder, device="cpu", **settings))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_random_model_decides_nothing(model_folder: Path, temperature: float) -> None:
    judge = judge_of(model_folder, batch_size=2, max_tokens=8, temperature=temperature)
    claims = [Claim("1+1?", "2", "2" * length) for length in (30, 1, 5000)]  # the last does not fit the model
    assert judge.correct_all(claims) == ["undecided"] * 3
    assert judge.compare(GREETING, "hello", "hi") is None
    assert judge.safe(GREETING, "hello") is None
    assert judge.good(GREETING, "hello") is None
    counts = judge.counts.to_dict()
    assert counts["items"] == counts["items/undecided"] == counts["asked"] == 6
    assert counts["outcome/prompt_too_long"] == 1
    assert sum(v for k, v in counts.items() if k.startswith("outcome/")) == 6
    assert counts["asked_again"] <= 5 and counts["completion_tokens"] <= 8 * (5 + counts["asked_again"])
    assert counts["prompt_tokens"] > 5 * 500  # each prompt file has more than 500 letters, one a token here


def test_a_batch_replies_like_single_prompts_in_their_order(model_folder: Path) -> None:
    judge = judge_of(model_folder, batch_size=3, max_tokens=4)
    prompts = ["a longer prompt", "b", "and a prompt that is longer still", "c"]
    dialogues = [[{"role": "user", "content": text}] for text in prompts]
    assert judge.voter.model.reply_all(dialogues, [0] * 4) == [
        judge.voter.model.reply_all([d], [0])[0] for d in dialogues
    ]
    assert judge.voter.model.reply_all([], []) == []


def test_repetitions_differ_and_can_be_repeated(model_folder: Path) -> None:
    import torch

    asked = [[{"role": "user", "content": "Well?"}]] * 4
    judge = judge_of(model_folder, temperature=1.0, max_tokens=16, batch_size=1)
    torch.manual_seed(1)
    replies = judge.voter.model.reply_all(asked, [0, 1, 2, 2])
    assert len(set(replies)) == 3 and replies[2] == replies[3]
    torch.manual_seed(2)
    assert judge.voter.model.reply_all(asked, [0, 1, 2, 2]) == replies
    drawn = torch.rand(1)
    torch.manual_seed(2)
    assert torch.rand(1) == drawn  # a judge takes none of the process's random numbers


def test_threads_get_the_replies_that_one_gets(model_folder: Path) -> None:
    model = judge_of(model_folder, temperature=1.0, max_tokens=32, batch_size=1).voter.model
    asked = [[[{"role": "user", "content": f"{who}?"}]] * 8 for who in "abcd"]
    alone = [model.reply_all(dialogues, range(8)) for dialogues in asked]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(lambda dialogues: model.reply_all(dialogues, range(8)), asked)] == alone
    assert model.counts["completion_tokens"] == 2 * sum(reply.tokens - len("a?") for of in alone for reply in of)


def test_a_reply_begins_with_the_reasoning_tag_that_its_prompt_ends_with(model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    tokenizer.save_pretrained(tmp_path)
    (reply,) = judge_of(tmp_path, max_tokens=4).voter.model.reply_all([[{"role": "user", "content": "Well?"}]], [0])
    assert reply.text.startswith("<think>") and answer_of(reply.text) == ""


def test_no_marker_of_the_tokenizer_survives_in_a_judged_text(model_folder: Path, tmp_path: Path) -> None:
    """The template's own markers stay special tokens; in what is judged they are letters, also if only this tokenizer
    knows them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    markers = [*MARKERS, "@@turn@@"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.chat_template = "{% for m in messages %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}[/INST]"
    tokenizer.save_pretrained(tmp_path)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    judge = judge_of(tmp_path, max_tokens=8)
    special = set(tokenizer.convert_tokens_to_ids(markers))
    template = tokenizer.convert_tokens_to_ids(["<start_of_turn>", "<end_of_turn>", "[/INST]"])
    for answer in [*INJECTIONS, "41 @@turn@@ <end_of_turn>"]:
        for text in (answer, prompt("correct", question="6 * 7?", reference="42", answer=answer)):
            ids = judge.voter.model._encode([{"role": "user", "content": text}])
            assert [token for token in ids if token in special] == template, text


def test_folder_without_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config.json is missing"):
        make_judge(JudgeSettings(kind="local", path=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no \\*.safetensors weights"):
        make_judge(JudgeSettings(kind="local", path=tmp_path))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"judge: .*: cannot load a tokenizer from here"):
        make_judge(JudgeSettings(kind="local", path=tmp_path))


@pytest.mark.parametrize("damage", ["NaN", "fewer layers", "another tokenizer"])
def test_a_damaged_folder(damage: str, model_folder: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    if damage == "NaN":
        next(weight for name, weight in weights.items() if "norm" in name)[0] = torch.nan
    elif damage == "fewer layers":
        config["num_hidden_layers"] -= 1
    else:
        weights = {name: w[:9] if "embed" in name or "lm_head" in name else w for name, w in weights.items()}
        config["vocab_size"] = 9
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"NaN": "not finite", "fewer layers": "weights of more", "another tokenizer": "tokenizer is another model's"}
    with pytest.raises(InputError, match=f"judge: .*{said[damage]}"):
        make_judge(JudgeSettings(kind="local", path=tmp_path))
