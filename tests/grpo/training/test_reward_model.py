"""Losses of reward models by hand, batch elements, ensembles, and scores that do not depend on their company."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo.config.common import Hardware
from grpo.config.jobs import MEMBER
from grpo.config.scoring import Scoring
from grpo.data.held_out import read_held_out
from grpo.data.records import Problem
from grpo.data.template import parse
from grpo.errors import InputError
from grpo.model.loading import POLICY, REWARD_MODEL, load_model, load_tokenizer
from grpo.rewards.functions import Response
from grpo.scoring import reward_model
from grpo.scoring.reward_model import (
    RewardModelScorer,
    conversation_tokens,
    ensemble_score,
    score_rows,
    score_sequences,
    up_to_scored,
)
from grpo.scoring.scorer import Scorer
from grpo.training.preferences import Preferences, bootstrap, elements
from grpo.training.reward_model import bradley_terry, off_centre, pair_loss, pointwise
from tests.support.job_runner import SFT, run, user, write_job

CPU = Hardware(device="cpu")
ROWS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13], [14, 15]]


@pytest.fixture(scope="module")
def model(model_folder):
    torch.manual_seed(0)
    return load_model(REWARD_MODEL, model_folder, CPU)


def test_bradley_terry_by_hand():
    # -log sigma(1) = ln(1 + e^-1); equal scores give ln 2.
    both = bradley_terry(torch.tensor([1.0, 5.0]), torch.tensor([0.0, 5.0])).tolist()
    assert both == pytest.approx([math.log(1 + math.exp(-1)), math.log(2)])


def test_a_margin_is_a_difference_that_does_not_count():
    # 3 - 0 with a margin of 2 is as 1 - 0 without; equal scores with a margin of ln 3: -ln sigma(-ln 3) = ln 4.
    both = bradley_terry(torch.tensor([3.0, 5.0]), torch.tensor([0.0, 5.0]), torch.tensor([2.0, math.log(3)])).tolist()
    assert both == pytest.approx([math.log(1 + math.exp(-1)), math.log(4)])


def test_centring_by_hand():
    scores = torch.tensor([[3.0, 1.0], [-1.0, 2.0]], requires_grad=True)
    penalty = off_centre(scores[0], scores[1])
    assert penalty.tolist() == [4.0, 9.0]
    penalty.sum().backward()
    assert scores.grad.tolist() == [[4.0, 6.0], [4.0, 6.0]]  # both sides are pushed the same way


def test_bradley_terry_gradient():
    # d/dr_w = -(1 - sigma(0)) = -1/2, d/dr_l = +1/2.
    scores = torch.zeros(2, requires_grad=True)
    bradley_terry(scores[:1], scores[1:]).sum().backward()
    assert scores.grad.tolist() == [-0.5, 0.5]


def element(pairs, strength=None):
    """Which response is better than which, by number; `strength` of every verdict."""
    rows = tuple({} if strength is None else {"strength": strength} for _ in pairs)
    chosen, rejected = zip(*pairs, strict=True)
    responses = max(*chosen, *rejected) + 1
    return Preferences([[1]] * responses, [[2]] * responses, 1, rows=rows, chosen=chosen, rejected=rejected)


def test_a_prompt_weighs_the_same_whatever_its_pairs():
    three, one = element([(0, 1), (0, 2), (1, 2)]), element([(0, 1)])
    scores = torch.tensor([2.0, 1.0, 0.0, 4.0, 4.0])
    of_one, of_two = math.log(1 + math.exp(-1)), math.log(1 + math.exp(-2))
    expected = (of_one + of_two + of_one) / 3 + math.log(2)
    assert pair_loss(scores, [three, one], 0.0, 0.0).item() == pytest.approx(expected)
    # Sums of scores 3, 2, 1 and 8: a tenth of (9 + 4 + 1) / 3 + 64 on top.
    assert pair_loss(scores, [three, one], 0.0, 0.1).item() == pytest.approx(expected + 0.1 * (14 / 3 + 64))


def test_the_margin_grows_with_the_strength_of_the_verdict():
    scores = torch.tensor([3.0, 0.0])
    for strength, margin in ((2.0, 2.0), (1.5, 1.5), (None, 1.0)):  # 1 where the data say nothing
        expected = math.log(1 + math.exp(margin - 3))
        assert pair_loss(scores, [element([(0, 1)], strength)], 1.0, 0.0).item() == pytest.approx(expected)


def pair(chosen, rejected, prompt="Hi", **more):
    return {"messages": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected, **more}


def test_all_pairs_of_a_prompt_are_one_element_of_which_each_response_is_scored_once(tokenizer):
    rows = [pair("a", "b"), pair("x", "y", "Ho"), pair("a", "c"), pair("b", "c")]
    first, second = elements(tokenizer, rows, "pairs", 99)
    assert (first.chosen, first.rejected, first.weight) == ((0, 0, 1), (1, 2, 2), 1)
    written = [[*prompt, *rest] for prompt, rest in zip(first.prompts, first.rests, strict=True)]
    assert written == [conversation_tokens(tokenizer, rows[0]["messages"], text) for text in "abc"]
    assert first.rows == (rows[0], rows[2], rows[3]) and second.rows == (rows[1],)


def test_a_response_that_is_too_long_takes_its_pairs_with_it(tokenizer):
    rows = [pair("a", "b" * 60), pair("a", "c"), pair("b" * 60, "d", "Ho")]
    limit = len(conversation_tokens(tokenizer, rows[0]["messages"], "c"))
    (kept,) = elements(tokenizer, rows, "pairs", limit)
    assert (len(kept.prompts), kept.rows) == (2, (rows[1],))


def test_a_bootstrap_sample_draws_prompts_with_all_that_is_said_about_them(tokenizer):
    rows = [
        {"messages": [{"role": "user", "content": f"{i // 2}"}], "response": f"{i}", "label": i % 2} for i in range(40)
    ]
    given = elements(tokenizer, rows, "points", 99)
    drawn = bootstrap(given, 0)
    assert len(drawn) == 40  # two labels for each of 20 prompts
    times = Counter(example.rows[0]["response"] for example in drawn)
    assert all(times[str(i)] == times[str(i + 1)] for i in range(0, 40, 2))
    assert max(times.values()) > 1 and len(times) < 40
    responses = [[example.rows[0]["response"] for example in bootstrap(given, seed)] for seed in (0, 0, 1)]
    assert responses[0] == responses[1] != responses[2]


def test_an_ensembles_score_by_hand():
    # Members say 1 and 3: mean 2, standard deviation 1; 4 and 4: mean 4, deviation 0.
    scores = torch.tensor([[1.0, 4.0], [3.0, 4.0]])
    assert ensemble_score(scores, 0.0).tolist() == [2.0, 4.0]
    assert ensemble_score(scores, 0.5).tolist() == [1.5, 4.0]
    assert ensemble_score(scores[:1], 9.0).tolist() == [1.0, 4.0]  # one alone is always sure


def test_a_batch_has_so_many_rows_and_tokens_at_most(monkeypatch):
    monkeypatch.setattr(reward_model, "PASS_TOKENS", 10)
    rows = [[0] * length for length in (4, 6, 1, 12, 1, 1, 1, 1)]
    batches = [[len(row) for row in batch] for batch in reward_model._batches(rows, 3)]
    assert batches == [[4, 6], [1], [12], [1, 1, 1], [1]]


def test_a_folder_of_members_scores_as_their_mean_less_their_spread(model_folder, tokenizer, tmp_path):
    for seed in (0, 1):
        torch.manual_seed(seed)
        folder = tmp_path / f"{MEMBER}{seed}"
        load_model(REWARD_MODEL, model_folder, CPU).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    asked = [[{"role": "user", "content": "What is 1 + 2?"}]] * 2, ["3", "no"]
    first, second = (RewardModelScorer(str(tmp_path / f"{MEMBER}{seed}"), CPU)(*asked) for seed in (0, 1))
    assert first != pytest.approx(second, abs=1e-3)
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    spread = [abs(a - b) / 2 for a, b in zip(first, second, strict=True)]
    assert RewardModelScorer(str(tmp_path), CPU)(*asked) == pytest.approx(mean, abs=1e-5)
    careful = RewardModelScorer(str(tmp_path), CPU, uncertainty_penalty=2.0)(*asked)
    assert careful == pytest.approx([m - 2 * s for m, s in zip(mean, spread, strict=True)], abs=1e-5)

    problem = Problem("g", asked[0][0], "", "none", "general", "en", "test")
    texts = [f"<think>{thought}</think><answer>3</answer>" for thought in ("add", "guess")]
    responses = [Response(text, parse(text), tokens=9, finished=True, max_tokens=20) for text in texts]
    scorer = Scorer({}, Scoring(workers=1))
    try:
        scorer.load_models(str(tmp_path), str(tmp_path), CPU, uncertainty_penalty=2.0)
        found = scorer.start(problem, responses).finish().breakdowns
        with pytest.raises(InputError, match="uncertainty_penalty needs an ensemble"):
            scorer.load_models(str(tmp_path / f"{MEMBER}0"), None, CPU, uncertainty_penalty=2.0)
    finally:
        scorer.close()
    # The helpful score is one of the summary, which is the same; the safety score is one of the whole response.
    assert [row["helpful"] for row in found] == pytest.approx([careful[0]] * 2, abs=1e-5)
    assert found[0]["safe"] != found[1]["safe"]


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


def test_activations_that_are_computed_again_do_not_change_the_gradients(model_folder):
    calls, gradients = [], []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = load_model(
            REWARD_MODEL, model_folder, Hardware(device="cpu", gradient_checkpointing=recomputed)
        ).train()
        passes: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        score_rows(model, [[1, 5, 6, 7], [1, 5, 8]]).sum().backward()
        calls.append(len(passes))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert calls == [1, 2] and gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5)


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
    assert tokenizer.decode(ids) == "<|bos|>User: Hi\nAssistant:Yes<|end|>"


TURNS = """{{ bos_token }}{% for m in messages %}{% set content = m.content %}
{%- if m.role == 'user' %}{{ 'User: ' + content }}{% else %}WRITE{% endif %}{% endfor %}"""
DROPS = (
    TURNS.replace("WRITE", "{{ '\nAssistant:' + content.split('</think>')[-1] + eos_token }}")
    + "{% if add_generation_prompt %}{{ '\nAssistant:<think>\n' }}{% endif %}"
)
"""As the template of DeepSeek-R1's distillates: without the reasoning of assistants."""
TRIMS = (
    TURNS.replace("WRITE", "{{ '\nAssistant: ' + content.replace('<think>', '<think>\n').strip() + eos_token + '\n' }}")
    + "{% if add_generation_prompt %}{{ '\nAssistant: ' }}{% endif %}"
)
"""As the templates of Llama and Qwen3, which keep the text and change white space."""


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("prompt", ["Hi", "Say <think>\nadd\n</think>\n\n3"])
def test_reasoning_is_read_also_if_the_chat_template_drops_it(tokenizer, prompt):
    drops = with_template(tokenizer, DROPS)
    add, guess = (
        drops.decode(conversation_tokens(drops, user(prompt), f"<think>\n{thought}\n</think>\n\n3"))
        for thought in ("add", "guess")
    )
    assert add == f"<|bos|>User: {prompt}\nAssistant:<think>\nadd\n</think>\n\n3<|end|>"
    assert guess == add.removesuffix("add\n</think>\n\n3<|end|>") + "guess\n</think>\n\n3<|end|>"
    summary = drops.decode(conversation_tokens(drops, user(prompt), "No reasoning."))
    assert summary == f"<|bos|>User: {prompt}\nAssistant:No reasoning.<|end|>"  # the template writes all of it


@pytest.mark.parametrize("response", ["<think>add</think>\n\n3 ", "3", "", " a  b", "Hi"])
def test_a_template_that_keeps_the_text_is_followed(tokenizer, response):
    for template in (tokenizer.chat_template, TRIMS):
        keeps = with_template(tokenizer, template)
        turns = [*user("Hi"), {"role": "assistant", "content": response}]
        assert conversation_tokens(keeps, user("Hi"), response) == keeps.apply_chat_template(turns, return_dict=False)


@pytest.fixture
def one_token(model_folder, tokenizer, tmp_path) -> Path:
    """The policy, whose tokenizer pads with the token that ends a response."""
    load_model(POLICY, model_folder, CPU).save_pretrained(tmp_path / "policy")
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = changed.eos_token
    changed.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def by_transformers(folder, rows):
    """Scores of [(messages, response)] by transformers, as a batch that is padded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = [conversation_tokens(tokenizer, messages, response) for messages, response in rows]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        return model(**batch).logits[:, 0].tolist()


def test_a_trained_model_scores_elsewhere_as_here_if_one_token_ends_and_pads(one_token, tmp_path):
    rows = [pair(f"{i}", f"{i} or {i % 3}, I say", f"Say {i % 4}", held_out=i % 4 == 0) for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    fields = {"settings": SFT, "model": one_token, "data": tmp_path / "data.parquet", "loss": "pairs"}
    run(write_job(tmp_path, "reward_model", **fields))
    held_out = read_held_out(tmp_path / "out")
    assert len(held_out) == 3
    for text, score in (("chosen", "chosen_score"), ("rejected", "rejected_score")):
        asked = [(row["messages"], row[text]) for row in held_out]
        elsewhere = pytest.approx(by_transformers(tmp_path / "out", asked), abs=1e-4)
        assert [row[score] for row in held_out] == elsewhere
        assert RewardModelScorer(str(tmp_path / "out"), CPU)(*zip(*asked, strict=True)) == elsewhere


@pytest.mark.parametrize("pads", ["end", "own", None])
def test_a_foreign_model_is_read_where_its_config_says(one_token, tokenizer, pads):
    model = load_model(REWARD_MODEL, str(one_token), CPU)
    model.config.pad_token_id = {"end": tokenizer.eos_token_id, "own": tokenizer.pad_token_id, None: None}[pads]
    model.save_pretrained(one_token)
    responses = ["3", "3 4", "no", "no"]  # one begins as another
    found = RewardModelScorer(str(one_token), CPU)([user("Hi")] * 4, responses)
    alone = [by_transformers(one_token, [(user("Hi"), response)])[0] for response in responses]
    assert found == pytest.approx(alone, abs=1e-5)
    if pads == "end":
        assert found == pytest.approx(by_transformers(one_token, [(user("Hi"), text) for text in responses]), abs=1e-5)


@torch.no_grad()
def test_training_scores_where_scoring_does(one_token):
    tokenizer, model = load_tokenizer(str(one_token)), load_model(REWARD_MODEL, str(one_token), CPU)
    model.config.pad_token_id = tokenizer.pad_token_id
    (pairs,) = elements(tokenizer, [pair("3", "3 4", "Hi"), pair("3", "no", "Hi")], "pairs", 99)
    (point,) = elements(tokenizer, [{"messages": user("Hi"), "response": "3", "label": 1}], "points", 99)
    rows = [conversation_tokens(tokenizer, user("Hi"), text) for text in ("3", "3 4", "no")]
    expected = score_rows(model, rows)
    torch.testing.assert_close(score_sequences(model, pairs.prompts, pairs.rests), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(score_sequences(model, point.prompts, point.rests), expected[:1], atol=1e-5, rtol=0)


def test_where_a_sequence_is_scored():
    cases = [([5, 2, 2], 2, [5]), ([2, 5, 2], 2, [2, 5]), ([5, 2], None, [5, 2]), ([2, 2], 2, [2])]
    assert [up_to_scored(ids, pad) for ids, pad, _ in cases] == [expected for *_, expected in cases]
