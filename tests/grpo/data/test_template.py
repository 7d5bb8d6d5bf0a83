"""Taking completions apart, and what of a sequence is learnt."""

from __future__ import annotations

import time

import pytest
import torch

from grpo.data.template import ZERO_TEMPLATE, Parts, completion_tokens, parse, prompt_tokens, reasoning_span, render
from grpo.errors import InputError
from grpo.model.loading import load_tokenizer
from grpo.training.sft import cross_entropy, tokenize

USER = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.mark.parametrize(
    "completion",
    [
        "<think>325 - 28\n= 297\n297 - 20 = 277</think><answer>277</answer>",
        "  <think>\n325 - 28\n= 297\n297 - 20 = 277\n</think>\n\n<answer>\n277\n</answer>\n",
        "<reasoning>325 - 28\n= 297\n297 - 20 = 277</reasoning>\n<answer>277</answer>",
    ],
)
def test_well_formed(completion):
    assert parse(completion) == Parts("325 - 28\n= 297\n297 - 20 = 277", "277", "277", True)


MALFORMED = {
    # completion: (reasoning, summary, answer)
    "277": ("", "277", None),
    "": ("", "", None),
    "<answer>277</answer>": ("", "277", "277"),
    "<think>a</think>277": ("a", "277", None),
    "<think>never ends": ("never ends", "", None),
    "<think>a</reasoning><answer>b</answer>": ("a</reasoning><answer>b</answer>", "b", "b"),
    "<think>a</think><answer>b": ("a", "b", None),
    "<think>a</think><answer></answer>": ("a", "", ""),
    "<think></think><answer>b</answer>": ("", "b", "b"),
    "<think> \n</think><answer>b</answer>": ("", "b", "b"),
    "<think>a</think><answer>b</answer><answer>c</answer>": ("a", "bc", "c"),
    "<think>a</think>then<think>b</think><answer>c</answer>": ("a", "c", "c"),
    "Sure! <think>a</think><answer>b</answer>": ("a", "b", "b"),
    "<think>a</think>so <answer>b</answer>": ("a", "so b", "b"),
    "<think>a</think><answer>b</answer> Good luck!": ("a", "b Good luck!", "b"),
    "<think>a <answer>b</answer></think><answer>c</answer>": ("a <answer>b</answer>", "c", "c"),
    # An answer in the reasoning only is none.
    "<think>a <answer>b</answer></think>": ("a <answer>b</answer>", "", None),
    "<think>a <answer>b</answer>": ("a <answer>b</answer>", "", None),
    "<answer>b</answer><think>a</think>": ("a", "", None),
    "<think>a</think><answer>b</answer><think>c <answer>d</answer>": ("a", "b", "b"),
    # Reasoning that nobody can see is none.
    "<think>\u200b\ufeff</think><answer>b</answer>": ("\u200b\ufeff", "b", "b"),
    "<think>\u3164 ...</think><answer>b</answer>": ("\u3164 ...", "b", "b"),
    "<think>\U00013441</think><answer>b</answer>": ("\U00013441", "b", "b"),
    "<think>a</think><answer>\u200b</answer>": ("a", "\u200b", "\u200b"),
}


@pytest.mark.parametrize("completion", MALFORMED)
def test_malformed(completion):
    parts = parse(completion)
    assert not parts.well_formed
    assert (parts.reasoning, parts.summary, parts.answer) == MALFORMED[completion]


def test_the_span_of_the_reasoning():
    for text in ("<think>a b</think><answer>c</answer>", "<reasoning>a b</reasoning>", "so <think>a b"):
        start, end = reasoning_span(text)
        assert text[start:end] == "a b"
    assert reasoning_span("a b") == (0, 0)


@pytest.mark.parametrize("repeated", ["<answer>", "</think><answer>", "<think>", "<think></answer>"])
def test_a_policy_that_repeats_a_tag_is_parsed_in_no_time(repeated):
    # Time that grows with the square of 40,000 tags would be minutes.
    started = time.monotonic()
    parse("<think>" + repeated * 40_000)
    assert time.monotonic() - started < 5


def test_an_answer_of_several_lines():
    assert parse("<think>a</think><answer>def f():\n    return 1</answer>").answer == "def f():\n    return 1"


@pytest.mark.parametrize(("reasoning", "answer"), [("a", "b"), ("two\nlines, x < y", "x > 3\nor"), (" a\n", " b ")])
def test_render_and_parse_are_inverse(reasoning, answer):
    assert parse(render(reasoning, answer)) == Parts(reasoning.strip(), answer.strip(), answer.strip(), True)


def test_chat_prompt(tokenizer):
    messages = [{"role": "system", "content": "add"}, *USER]
    ids = prompt_tokens(tokenizer, messages, "chat")
    assert tokenizer.decode(ids) == "<|bos|>User: add\nUser: What is 1 + 2?\nAssistant:"


def test_r1_zero_prompt(tokenizer):
    text = tokenizer.decode(prompt_tokens(tokenizer, USER, "r1_zero"))
    assert text == "<|bos|>" + ZERO_TEMPLATE.replace("{prompt}", "What is 1 + 2?")
    assert text.endswith("Assistant:")


def test_r1_zero_prompt_with_its_own_template(tokenizer):
    # Braces in a problem are no placeholders; what the system said has no place in the template.
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "What is {1} + {prompt}?"}]
    assert tokenizer.decode(prompt_tokens(tokenizer, messages, "r1_zero", "Q: {prompt}\nA:")) == (
        "<|bos|>Q: What is {1} + {prompt}?\nA:"
    )


def test_a_tokenizer_without_chat_template(model_folder):
    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        prompt_tokens(tokenizer, USER, "chat")


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer):
    text = render("1 + 2 = 3\nnaïve, 日本", "3")
    ids = completion_tokens(tokenizer, text)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<think>")


def test_a_sum_has_the_same_tokens_in_a_prompt_and_in_a_solution(tokenizer):
    ids = tokenizer("What is 1 + 2?")["input_ids"]
    terms = tokenizer("so 1 + 2 = 3")["input_ids"]
    assert {tokenizer.convert_tokens_to_ids(t) for t in ("1", "Ġ+Ġ", "2")} <= set(ids) & set(terms)


def test_only_the_response_is_learnt(tokenizer, policy, plain):
    pairs = [{"messages": USER, "completion": "3"}, {"messages": USER, "completion": "it is 3"}]
    examples, dropped = tokenize(tokenizer, pairs, 100)
    assert dropped == 0
    assert [tokenizer.decode(e.rests[0]) for e in examples] == ["3<|end|>", "it is 3<|end|>"]
    assert [e.weight for e in examples] == [len(e.rests[0]) for e in examples]
    # The loss is the plain model's cross-entropy with labels on the completion only, summed over its tokens.
    losses = []
    for e in examples:
        ids = torch.tensor([[*e.prompts[0], *e.rests[0]]])
        labels = torch.tensor([[*([-100] * len(e.prompts[0])), *e.rests[0]]])
        losses.append(plain(ids, labels=labels).loss.item() * e.weight)
    with torch.no_grad():
        assert cross_entropy(policy, examples).item() == pytest.approx(sum(losses), rel=1e-5)


def test_long_sequences_are_dropped_and_counted(tokenizer):
    pairs = [{"messages": USER, "completion": c} for c in ("3", "it is 3")]
    short = len(tokenize(tokenizer, pairs, 100)[0][0].prompts[0]) + 2  # prompt, "3", end
    rows, dropped = tokenize(tokenizer, pairs, short)
    assert (len(rows), dropped) == (1, 1)
    assert tokenize(tokenizer, pairs, short - 1) == ([], 2)
