"""Losses of the reward models by hand, and scores that do not depend on their company."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from grpo.config import Hardware
from grpo.policy import load_reward_model
from grpo.reward_model import bradley_terry, pointwise
from grpo.scoring import RewardModelScorer, conversation_tokens, score_rows

CPU = Hardware(device="cpu")
ROWS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13], [14, 15]]


@pytest.fixture(scope="module")
def model(model_folder):
    torch.manual_seed(0)
    return load_reward_model(model_folder, CPU)


def test_bradley_terry_by_hand():
    # -log sigma(1) = ln(1 + e^-1); equal scores give ln 2; the loss is their mean.
    assert bradley_terry(torch.tensor([1.0]), torch.tensor([0.0])).item() == pytest.approx(math.log(1 + math.exp(-1)))
    both = bradley_terry(torch.tensor([1.0, 5.0]), torch.tensor([0.0, 5.0])).item()
    assert both == pytest.approx((math.log(1 + math.exp(-1)) + math.log(2)) / 2)


def test_bradley_terry_gradient():
    # d/dr_w = -(1 - sigma(0)) = -1/2, d/dr_l = +1/2.
    scores = torch.zeros(2, requires_grad=True)
    bradley_terry(scores[:1], scores[1:]).backward()
    assert scores.grad.tolist() == [-0.5, 0.5]


def test_pointwise_by_hand():
    # sigma(ln 3) = 3/4: -ln 3/4 where the label is 1, -ln 1/4 where it is 0.
    score = torch.tensor([math.log(3)])
    assert pointwise(score, torch.tensor([1.0])).item() == pytest.approx(math.log(4 / 3))
    assert pointwise(score, torch.tensor([0.0])).item() == pytest.approx(math.log(4))
    both = pointwise(score.repeat(2), torch.tensor([1.0, 0.0])).item()
    assert both == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


@torch.no_grad()
def test_a_score_depends_on_its_row_only(model):
    together = score_rows(model, ROWS)
    alone = torch.cat([score_rows(model, [row]) for row in ROWS])
    backwards = score_rows(model, ROWS[::-1]).flip(0)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(together, backwards, atol=1e-5, rtol=0)
    assert together.unique().numel() == len(ROWS)


@torch.no_grad()
def test_a_score_is_the_models_own_at_the_last_token(model, tmp_path):
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for row in ROWS:
        torch.testing.assert_close(score_rows(model, [row]), plain(torch.tensor([row])).logits[0], atol=1e-5, rtol=0)


def test_the_scorer_batches_without_changing_a_score(model_folder, model, tmp_path, tokenizer):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    messages = [[{"role": "user", "content": "What is 1 + 2?"}]] * 5
    responses = ["3", "it is 3", "4", "no", "add 1 and 2"]
    whole, split = (RewardModelScorer(str(tmp_path), CPU, size)(messages, responses) for size in (64, 2))
    assert len(whole) == 5
    assert whole == pytest.approx(split, abs=1e-5)


def test_a_reward_model_reads_the_prompt_and_the_ended_response(tokenizer):
    ids = conversation_tokens(tokenizer, [{"role": "user", "content": "Hi"}], "Yes")
    assert tokenizer.decode(ids) == "<|bos|><|user|>Hi<|assistant|>Yes<|end|>"
