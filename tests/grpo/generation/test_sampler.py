"""Sampling: the distribution it draws from, its order, and its agreement with the trainer and with transformers."""

from __future__ import annotations

import pytest
import torch

from grpo.config.common import Sampling
from grpo.generation import sampler
from grpo.generation.draw_tokens import _cumulative_by_blocks, _cumulative_by_product, draw_tokens
from grpo.generation.sampler import generator_for, sample, sample_groups, seed_of
from grpo.model.decoder import Decoder
from grpo.model.logprobs import completion_logprobs


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = ["What is 1 + 2?", "add 3", "What is 4 + 5? 4 + 5 =", "7"]
    ids = [[tokenizer.bos_token_id, *tokenizer(t)["input_ids"]] for t in texts]
    assert len({len(i) for i in ids}) == 4
    return ids


def draw(policy, tokenizer, prompts, per_prompt=3, seed=0, eos_id=None, **settings):
    settings = Sampling(**{"max_new_tokens": 12, **settings})
    return sample(
        policy,
        prompts,
        per_prompt,
        settings,
        eos_id=tokenizer.eos_token_id if eos_id is None else eos_id,
        seeds=[seed_of(seed, number) for number in range(len(prompts))],
    )


def tokens_of(groups):
    return [[c.tokens for c in group] for group in groups]


def test_the_seed_decides(policy, tokenizer, prompts):
    first, again, other = (tokens_of(draw(policy, tokenizer, prompts, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_process_without_prompts_samples_nothing(policy, tokenizer):
    """As with more processes than problems in a step."""
    assert draw(policy, tokenizer, []) == []


def test_streams_differ_in_every_part():
    streams = [generator_for(seed, step, use) for seed in range(3) for step in range(20) for use in (0, 1)]
    assert len({torch.randint(2**60, (1,), generator=g).item() for g in streams}) == len(streams)


@pytest.mark.parametrize("batch_size", [256, 6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers(policy, tokenizer, prompts, temperature, batch_size):
    # A common token as end mark lets rows leave the batch at different times.
    ends = frequent_token(policy, tokenizer, prompts, temperature=temperature)
    groups = draw(policy, tokenizer, prompts, 6, temperature=temperature, eos_id=ends, batch_size=batch_size)
    flat = [c for group in groups for c in group]
    assert len({len(c.tokens) for c in flat}) > 2
    with torch.no_grad():
        repeated = [p for p in prompts for _ in range(6)]
        trainer = completion_logprobs(policy, repeated, [c.tokens for c in flat], temperature)
    for row, completion in zip(trainer, flat, strict=True):
        length = len(completion.tokens)
        torch.testing.assert_close(row[:length], torch.tensor(completion.logprobs), atol=1e-4, rtol=0)
        assert row[length:].abs().sum() == 0


def frequent_token(policy, tokenizer, prompts, **settings):
    flat = torch.tensor([t for g in draw(policy, tokenizer, prompts, 6, **settings) for c in g for t in c.tokens])
    return flat.mode().values.item()


@pytest.mark.parametrize("batch_size", [1, 3, 7, 12])
def test_who_shares_the_batch_does_not_matter(policy, tokenizer, prompts, batch_size):
    # The first three prompts alone, in any batches, with the others waiting: the same random numbers draw_tokens.
    ends = frequent_token(policy, tokenizer, prompts)
    expected = tokens_of(draw(policy, tokenizer, prompts, eos_id=ends))
    assert tokens_of(draw(policy, tokenizer, prompts, eos_id=ends, batch_size=batch_size)) == expected
    assert tokens_of(draw(policy, tokenizer, prompts[:3], eos_id=ends, batch_size=batch_size)) == expected[:3]


def test_prompts_join_so_many_tokens_at_a_time(policy, tokenizer, prompts, monkeypatch):
    expected, passes = tokens_of(draw(policy, tokenizer, prompts)), []
    add_groups = Decoder.add_groups

    def noted(self, joining, size):
        passes.append([len(prompt) for prompt in joining])
        return add_groups(self, joining, size)

    monkeypatch.setattr(Decoder, "add_groups", noted)
    lengths = sorted(map(len, prompts), reverse=True)
    monkeypatch.setattr(sampler, "PASS_TOKENS", lengths[0])
    assert tokens_of(draw(policy, tokenizer, prompts)) == expected
    assert len(passes) > 1 and all(sum(each) <= lengths[0] for each in passes)
    assert [length for each in passes for length in each] == lengths
    passes.clear()
    monkeypatch.setattr(sampler, "PASS_TOKENS", 1)  # one at least
    assert tokens_of(draw(policy, tokenizer, prompts)) == expected and passes == [[length] for length in lengths]


def test_a_group_comes_as_soon_as_it_is_done(policy, tokenizer, prompts):
    # One group at a time fits: the longest prompt, number 2, is first, and nothing waits for the others.
    settings = Sampling(max_new_tokens=4, batch_size=3)
    seeds = list(range(4))
    found = sample_groups(policy, prompts, 3, settings, eos_id=tokenizer.eos_token_id, seeds=seeds)
    order = [index for index, _ in found]
    assert order == sorted(range(4), key=lambda i: -len(prompts[i]))


def test_a_tiny_temperature_is_greedy_generation(policy, plain, tokenizer, prompts):
    groups = draw(policy, tokenizer, prompts, 2, temperature=1e-4)
    for prompt, group in zip(prompts, groups, strict=True):
        expected = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
        assert [c.tokens for c in group] == [expected.tolist()] * 2


def test_an_end_mark_ends(policy, tokenizer, prompts):
    ends = frequent_token(policy, tokenizer, prompts)
    flat = [c for g in draw(policy, tokenizer, prompts, 6, eos_id=ends, max_new_tokens=8) for c in g]
    assert {c.finished for c in flat} == {True, False}
    for completion in flat:
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.finished == (completion.tokens[-1] == ends)
        assert ends not in completion.tokens[:-1]
        assert completion.finished or len(completion.tokens) == 8


def test_the_longest_completion_is_not_finished(policy, tokenizer, prompts):
    flat = [c for g in draw(policy, tokenizer, prompts, eos_id=-1, max_new_tokens=3) for c in g]
    assert [(len(c.tokens), c.finished) for c in flat] == [(3, False)] * 12


def test_groups_come_in_the_order_of_their_prompts(policy, tokenizer, prompts):
    # Greedy completions identify their prompt; batches of two prompts are made by length, not in this order.
    alone = [draw(policy, tokenizer, [p], 1, temperature=1e-4)[0][0].tokens for p in prompts]
    assert len(set(map(tuple, alone))) > 1
    for batch_size in (256, 4):
        groups = draw(policy, tokenizer, prompts, 2, temperature=1e-4, batch_size=batch_size)
        assert tokens_of(groups) == [[tokens, tokens] for tokens in alone]


def evenly(count):
    """Chances in the middle of equal parts of [0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def test_a_token_without_probability_is_never_chosen():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, 5)
    chances = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    token, logprob = draw_tokens(logits, Sampling(max_new_tokens=1), chances)
    assert token.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprob, torch.full((3,), 0.5).log())


@pytest.mark.parametrize("tokens", [10, 5000])
def test_the_nucleus_is_the_same_whether_all_tokens_are_sorted_or_few(tokens, monkeypatch):
    torch.manual_seed(0)
    logits, settings = torch.randn(8, tokens) * 3, Sampling(top_p=0.95, max_new_tokens=1)
    few = draw_tokens(logits, settings, evenly(8))
    monkeypatch.setattr("grpo.generation.draw_tokens.CANDIDATES", 1)  # never enough
    all_of_them = draw_tokens(logits, settings, evenly(8))
    assert few[0].tolist() == all_of_them[0].tolist()


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {2}), (0.49, {2}), (0.6, {2, 0}), (0.81, {2, 0, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_exactly_the_nucleus(top_p, kept):
    # By falling probability: tokens 2, 0, 3 and 1, with 0, 0.5, 0.75 and 0.88 of the mass before them.
    probabilities = torch.tensor([0.25, 0.12, 0.5, 0.13])
    logits = probabilities.log().expand(2000, 4)
    token, logprob = draw_tokens(logits, Sampling(top_p=top_p, max_new_tokens=1), evenly(2000))
    assert set(token.tolist()) == kept
    torch.testing.assert_close(logprob, probabilities[token].log())  # of the whole distribution, not of the nucleus


def test_frequencies_follow_the_temperature():
    # At temperature 1/2 the odds 3 : 1 become 9 : 1, so of 10,000 chances spread evenly 9,000 draw_tokens the first.
    logits = torch.tensor([3.0, 1.0]).log().expand(10_000, 2)
    token, logprob = draw_tokens(logits, Sampling(temperature=0.5, max_new_tokens=1), evenly(10_000))
    assert (token == 0).sum().item() == 9_000
    assert logprob[token == 0][0].item() == pytest.approx(torch.tensor(0.9).log().item())


def test_cumulative_sums_on_a_gpu_by_hand():
    found = _cumulative_by_product(torch.tensor([[0.5, 0.25, 0.125], [1.0, 0.0, 2.0]]))
    assert found.tolist() == [[0.5, 0.75, 0.875], [1.0, 1.0, 3.0]]
    assert found.dtype == torch.float64


def test_cumulative_sums_of_a_whole_vocabulary_by_hand():
    # Blocks of two; the last is filled up.
    found = _cumulative_by_blocks(torch.tensor([[4.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.25], [1.0] * 7]))
    assert found.tolist() == [[4.0, 6.0, 7.0, 8.0, 8.5, 9.0, 9.25], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]


@pytest.mark.parametrize("tokens", [4, 10, 5000])
def test_the_nucleus_of_a_gpu_is_that_of_a_cpu_without_cumsum(tokens, monkeypatch):
    torch.manual_seed(0)
    logits, settings = torch.randn(64, tokens) * 3, Sampling(top_p=0.9, max_new_tokens=1)
    expected = draw_tokens(logits, settings, evenly(64))
    monkeypatch.setattr("grpo.generation.draw_tokens.in_fixed_order", lambda _: True)

    def without_order(*_, **__):
        raise AssertionError("cumsum has no fixed order on a GPU")

    monkeypatch.setattr(torch.Tensor, "cumsum", without_order)
    token, logprob = draw_tokens(logits, settings, evenly(64))
    assert token.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprob, expected[1])
