"""Muon: which weights it trains, what its updates are, and that a killed job goes on bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from grpo.config.common import Optimizer, Sampling
from grpo.config.rl import RL
from grpo.config.supervised import SFT
from grpo.training.optimizer import make_optimizer, trained
from grpo.training.optimizers import muon
from grpo.training.optimizers.muon import Muon, groups_of, orthogonal
from tests.support.job_runner import PRETRAIN, kill_at, metrics, run, same, weights, write_job

SETTINGS = Optimizer(kind="muon", learning_rate=0.01)


def small_model(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=tied, **sizes))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_head_and_norms_are_not_matrices_of_hidden_layers(tied: bool) -> None:
    model = small_model(tied)
    model.model.layers[0].mlp.up_proj.requires_grad_(False)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = ({names[id(p)] for p in group["params"]} for group in groups_of(model))
    assert len(matrices) == 2 * 7 - 1 and all(".self_attn." in name or ".mlp." in name for name in matrices)
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= others and ("lm_head.weight" in others) != tied
    assert len(matrices | others) == len(names) - 1


@pytest.mark.parametrize(
    ("kind", "config", "head"),
    [
        (LlamaForSequenceClassification, LlamaConfig, "score.weight"),
        (GPT2ForSequenceClassification, GPT2Config, "score.weight"),
        (GPTNeoXJapaneseForCausalLM, GPTNeoXJapaneseConfig, "embed_out.weight"),
    ],
)
def test_a_head_of_any_name_is_no_hidden_matrix(kind: Any, config: Any, head: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False}
    model = kind(config(vocab_size=40, num_labels=1, bos_token_id=0, eos_token_id=1, **sizes))
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = ({names[id(p)] for p in group["params"]} for group in groups_of(model))
    assert head in others and matrices and all(".layers." in name or ".h." in name for name in matrices)


def test_an_orthogonal_matrix_has_singular_values_near_one() -> None:
    torch.manual_seed(0)
    made = orthogonal(torch.randn(3, 8, 20))
    for found in torch.linalg.svdvals(made):
        assert float(found.min()) > 0.6 and float(found.max()) < 1.25
    one = torch.zeros(1, 2, 3)
    assert torch.equal(orthogonal(one), one)  # no gradient, no update
    # A matrix of rank one keeps its direction: (3, 4) / 5.
    line = orthogonal(torch.tensor([[[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]]))[0]
    assert float(line[0, 1] / line[0, 0]) == pytest.approx(4 / 3, rel=1e-4) and torch.equal(line[1], torch.zeros(3))


@pytest.mark.parametrize("stacked", [muon.STACKED, 1])
def test_updates_are_those_of_torchs_muon(stacked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "STACKED", stacked)
    """torch.optim.Muon with the scale that matches AdamW, on matrices of three shapes."""
    mine, theirs = small_model(), small_model()
    ours = make_optimizer(trained(mine, SETTINGS), SETTINGS)
    assert isinstance(ours, Muon)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    torchs = torch.optim.Muon(groups_of(theirs)[0]["params"], **options)
    tokens = torch.randint(0, 40, (4, 12))
    for _ in range(3):
        for model in (mine, theirs):
            model(tokens, labels=tokens).loss.backward()
        for p in groups_of(mine)[1]["params"]:
            p.grad = None  # the others are AdamW's
        before = [p.detach().clone() for p in groups_of(mine)[0]["params"]]
        ours.step()
        torchs.step()
        for old, new, other in zip(before, groups_of(mine)[0]["params"], groups_of(theirs)[0]["params"], strict=True):
            # torch's iteration is in bfloat16, with 8 significant bits.
            assert float((new - other).norm() / (new - old).norm()) < 0.06
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            b.data.copy_(a.data)
            a.grad = b.grad = None


def test_other_weights_are_trained_by_adamw() -> None:
    mine, theirs = small_model(), small_model()
    settings = SETTINGS.model_copy(update={"weight_decay": 0.1})
    ours = make_optimizer(trained(mine, settings), settings)
    usual = make_optimizer(groups_of(theirs)[1]["params"], settings.model_copy(update={"kind": "adamw"}))
    for seed in range(3):
        torch.manual_seed(seed)
        for p, q in zip(groups_of(mine)[1]["params"], groups_of(theirs)[1]["params"], strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        usual.step()
    for p, q in zip(groups_of(mine)[1]["params"], groups_of(theirs)[1]["params"], strict=True):
        assert torch.equal(p, q)


def test_where_it_does_not_work() -> None:
    with pytest.raises(ValidationError, match="optimizer.kind 'muon' is for pretraining, SFT and reward models"):
        RL(steps=1, kl_coef=0.0, sampling=Sampling(max_new_tokens=1), optimizer=SETTINGS)
    with pytest.raises(ValidationError, match="optimizer.kind 'muon' needs whole matrices; set hardware.processes"):
        SFT(optimizer=SETTINGS, hardware={"processes": 2})


@pytest.mark.system
def test_a_killed_job_goes_on_bit_by_bit(tmp_path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"What is {a} + {b}? {a + b}" for a in range(20) for b in range(20)))
    settings = {**PRETRAIN, "optimizer": {"kind": "muon", "learning_rate": 0.01}, "save_every": 7}
    run(write_job(tmp_path / "whole", "pretrain", settings=settings, corpus=corpus))
    killed = write_job(tmp_path / "killed", "pretrain", settings=settings, corpus=corpus)
    kill_at(killed, 10)
    run(killed)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    losses = [row["loss"] for row in metrics(tmp_path / "whole")]
    assert losses[-1] < 0.5 * losses[0]
