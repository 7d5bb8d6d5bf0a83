"""A reward model from elsewhere as a reward in RL: what enters the key, and what the trainer is given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import alignment_rl, r1_zero, reasoning_rl, rlhf_ppo
from flows.stages.problems import HELD_OUT, TEST_SETS
from grpo.config.common import Hardware, Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from grpo.scoring.reward_model import RewardModelScorer
from grpo.training.preferences import read_preferences
from grpo.training.pretrain import train_tokenizer


def test_folders_enter_the_key_by_their_contents_and_hub_models_by_name() -> None:
    models = 'alignment_rl.reward_models={helpful="./mine",safe="somebody/safe"}'
    config = load_recipe("tiny", [models]).alignment_rl
    for stage in (alignment_rl.STAGE, reasoning_rl.STAGE, r1_zero.STAGE, rlhf_ppo.STAGE):
        assert stage.files(config) == {"helpful_model": "./mine", "safe_model": "somebody/safe"}
    hashed = hashed_config(alignment_rl.STAGE, config, 0)
    assert hashed["reward_models"] == {"helpful": "input:helpful_model", "safe": "input:safe_model"}
    assert "reward_models" not in load_recipe("tiny").alignment_rl.model_dump()  # keys of earlier versions stay


def test_pairs_of_dpo_enter_the_key_and_belong_to_dpo() -> None:
    config = load_recipe("tiny", ["reasoning_rl.method=dpo", 'reasoning_rl.dpo={files=["a.jsonl"]}']).reasoning_rl
    assert reasoning_rl.STAGE.files(config) == {"pairs0": Path("a.jsonl")}
    assert hashed_config(reasoning_rl.STAGE, config, 0)["dpo"]["files"] == ["input:pairs0"]
    assert "files" not in load_recipe("tiny").reasoning_rl.dpo.model_dump()
    with pytest.raises(InputError, match="dpo.files are pairs for method 'dpo'; method is 'grpo'"):
        load_recipe("tiny", ['reasoning_rl.dpo={files=["a.jsonl"]}'])


def test_pairs_of_dpo_are_about_no_prompt_of_the_evaluation(tmp_path: Path) -> None:
    (tmp_path / "problems" / TEST_SETS).mkdir(parents=True)
    for name, prompt in ((HELD_OUT, "Held out?"), (f"{TEST_SETS}/set.parquet", "In a test set?")):
        problem = Problem(prompt, [{"role": "user", "content": prompt}], "1", "exact", "reasoning", "en", "file")
        write_rows(tmp_path / "problems" / name, [problem], Problem)
    rows = [{"prompt": p, "chosen": "a", "rejected": "b"} for p in ("held OUT?", "In a test set?", "Elsewhere?")]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    context: Any = SimpleNamespace(attempt=SimpleNamespace(state=tmp_path), path=lambda name: tmp_path / name)
    kept, _ = read_preferences(reasoning_rl._pairs(context, [file]), "pairs")
    assert [row["messages"][-1]["content"] for row in kept] == ["Elsewhere?"]
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(InputError, match="all pairs are about prompts of the evaluation"):
        reasoning_rl._pairs(context, [file])


def test_another_name_is_refused() -> None:
    with pytest.raises(InputError, match="alignment_rl.reward_models"):
        load_recipe("tiny", ['alignment_rl.reward_models={kind="x"}'])


def test_a_model_saved_by_transformers_scores_as_transformers_does(tmp_path: Path) -> None:
    settings = Pretrain(vocabulary=320, steps=1, context=128, optimizer=Optimizer(learning_rate=1e-3))
    tokenizer = train_tokenizer(["What is 1 + 2? It is 3.", "Good day to you."] * 20, settings)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, **shape)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = [{"role": "user", "content": "What is 1 + 2?"}]
    scorer = RewardModelScorer(str(tmp_path / "model"), Hardware(device="cpu"))
    scores = scorer([asked, asked], ["It is 3.", "Good day."])
    for text, score in zip(("It is 3.", "Good day."), scores, strict=True):
        turns = [*asked, {"role": "assistant", "content": text}]
        ids = torch.tensor([tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)])
        assert score == pytest.approx(model(ids).logits.item(), abs=1e-5)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InputError, match="its tokenizer has a chat template"):
        RewardModelScorer(str(tmp_path / "model"), Hardware(device="cpu"))
