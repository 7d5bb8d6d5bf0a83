"""Answers in tags, in boxes, or either: parsing and rendering, styles, and prompts that open the reasoning."""

from __future__ import annotations

import pytest

from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.data.template import (
    BOXED_ZERO_TEMPLATE,
    AnswerForm,
    Parts,
    completion_tokens,
    continuation,
    form_of,
    last_box,
    opened_reasoning,
    parse,
    prompt_tokens,
    prompted_by,
    with_style,
)
from grpo.errors import InputError
from grpo.rewards.functions import Response, accuracy, consistency, format_
from grpo.scoring.scorer import responses_of
from grpo.training.sft import tokenize

HENS = "<think>\n325 - 28 = 297, less 20: 277\n</think>\n\nThere are \\boxed{277} hens that lay."


def problem(style: str | None = "boxed", verifier: str = "number", answer: str = "277") -> Problem:
    metadata = {} if style is None else {"answer_style": style}
    messages = [{"role": "user", "content": "How many hens lay?"}]
    return Problem("hens", messages, answer, verifier, "reasoning", "en", "test", metadata)


def test_reasoning_then_a_summary_with_a_box():
    reasoning, summary = "325 - 28 = 297, less 20: 277", "There are \\boxed{277} hens that lay."
    assert parse(HENS, "boxed") == Parts(reasoning, summary, "277", True)
    assert parse(HENS, "auto") == parse(HENS, "boxed")
    assert parse(HENS).answer is None and not parse(HENS).well_formed


@pytest.mark.parametrize(
    ("completion", "summary", "answer"),
    [
        ("no tags, \\boxed{1}", "no tags, \\boxed{1}", "1"),
        ("<think>a</think>", "", None),
        ("<think>a</think>it is 1", "it is 1", None),
        ("<think>a, so \\boxed{1}</think>it is 1", "it is 1", None),  # boxed in the reasoning only
        ("<think>a, so \\boxed{1}", "", None),
        ("<think>a</think>\\boxed{1}<think>b</think>\\boxed{2}", "\\boxed{2}", "2"),
        ("<think>a</think>\\boxed{1}<think>b, \\boxed{2}", "\\boxed{1}", "1"),
        ("so <think>a</think>\\boxed{1}", "\\boxed{1}", "1"),
        ("<think></think>\\boxed{1}", "\\boxed{1}", "1"),
        ("<think>\u200b</think>\\boxed{1}", "\\boxed{1}", "1"),
        ("<think>a</think>\\boxed{}", "\\boxed{}", ""),
        ("<think>a</think>\\boxed{1", "\\boxed{1", None),
        ("<think>a</reasoning>\\boxed{1}", "\\boxed{1}", "1"),
    ],
)
def test_malformed(completion, summary, answer):
    parts = parse(completion, "boxed")
    assert (parts.summary, parts.answer, parts.well_formed) == (summary, answer, False)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),  # braces that are printed
        ("\\boxed{[0, 1\\}}", "[0, 1\\}"),
        ("\\boxed{1 or \\boxed{2}}", "1 or \\boxed{2}"),  # the outer box is the answer
        ("\\boxed {3}", "3"),
        ("\\boxed{1}, \\boxed{2", "1"),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_the_last_box(text, box):
    assert last_box(text) == box


def test_auto_reads_what_the_completion_has():
    tagged = "<think>a</think><answer>\\boxed{1}</answer>"
    assert parse(tagged, "auto") == parse(tagged)
    # Tags in the reasoning are no reason to look for an answer in tags.
    assert parse("<think>in <answer>1</answer>?</think>\\boxed{2}", "auto").answer == "2"
    assert parse("<think>a</think> \\boxed{2}", "auto").well_formed


@pytest.mark.parametrize("style", ["tags", "boxed", "auto"])
@pytest.mark.parametrize("verifier", ["number", "code", "none"])
def test_render_and_parse_are_inverse(style, verifier):
    form = form_of(problem(style, verifier))
    parts = form.parse(form.render("two\nlines", " \\frac{1}{2} "))
    assert (parts.reasoning, parts.answer, parts.well_formed) == ("two\nlines", "\\frac{1}{2}", True)


def test_render_keeps_a_summary_that_holds_the_box():
    form = AnswerForm("boxed")
    assert form.render("325 - 28 = 297, less 20: 277", "277", "There are \\boxed{277} hens that lay.") == HENS
    assert form.render("a", "277", "277 hens") == "<think>\na\n</think>\n\n\\boxed{277}"
    assert AnswerForm().render("a", "277", "277 hens") == "<think>\na\n</think>\n<answer>277</answer>"


def test_programs_and_general_prompts_have_no_box():
    text = "<think>double it</think>\n```python\nprint(2 * int(input()))\n```\nIt doubles."
    for verifier in ("code", "none"):
        parts = form_of(problem("boxed", verifier)).parse(text)
        assert parts.well_formed and parts.answer == parts.summary == text.partition("</think>")[2].strip()
    assert not form_of(problem("boxed", "number")).parse(text).well_formed


def test_rewards_follow_the_problems_style():
    for style, text in (("boxed", HENS), ("tags", "<think>325 - 48 = 277</think><answer>277</answer>")):
        for asked in ("boxed", "tags", "auto", None):
            response = Response.to(problem(asked), text, 9, True, 20)
            right = float((asked or "tags") in (style, "auto"))
            scores = [reward(problem(asked), response) for reward in (accuracy, format_, consistency)]
            assert scores == [right] * 3, (
                style,
                asked,
            )


def test_an_unknown_style_is_named():
    with pytest.raises(InputError, match="problem hens: answer_style is 'box'; known are tags, boxed, auto"):
        form_of(problem("box"))


def test_a_problems_own_style_goes_before_that_of_its_set():
    assert with_style(problem(None), "boxed").metadata == {"answer_style": "boxed"}
    assert with_style(problem(None), "tags").metadata == {}  # the default leaves records as they were
    assert with_style(problem("auto"), "boxed").metadata == {"answer_style": "auto"}


def test_a_plain_text_template_asks_for_its_own_style():
    def styles(*template: str) -> list[str]:
        return [form_of(p).style for p in prompted_by([problem("boxed"), problem(None)], *template)]

    assert styles("chat") == ["boxed", "tags"]
    assert styles("r1_zero") == ["tags", "tags"]  # R1-Zero's asks for answer tags
    assert styles("r1_zero", BOXED_ZERO_TEMPLATE) == ["boxed", "boxed"]
    assert styles("r1_zero", "User: {prompt}\nAssistant:") == ["boxed", "tags"]


# Written by us after the templates of DeepSeek-R1's distillates and of Qwen3: the generation prompt opens the
# reasoning, holds an empty one, or leaves it to the model.
ROLES = "{{ '<|bos|>' }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
GENERATION = "{% if add_generation_prompt %}{{ 'assistant: GENERATION' }}{% endif %}"
TEMPLATES = {
    "opens": (ROLES + GENERATION.replace("GENERATION", "<think>\n"), "<think>\n"),
    "opens without a line break": (ROLES + GENERATION.replace("GENERATION", "<think>"), "<think>"),
    "closed": (ROLES + GENERATION.replace("GENERATION", "<think>\n\n</think>\n\n"), ""),
    "leaves it": (ROLES + GENERATION.replace("GENERATION", ""), ""),
}


@pytest.fixture(params=TEMPLATES)
def templated(request, model_folder):
    from grpo.model.loading import load_tokenizer

    tokenizer = load_tokenizer(model_folder)
    tokenizer.chat_template, opened = TEMPLATES[request.param]
    return tokenizer, opened


def test_completions_of_a_prompt_that_opens_the_reasoning_are_whole(templated):
    tokenizer, opened = templated
    asked = problem("boxed")
    prompt = prompt_tokens(tokenizer, asked.messages, "chat")
    assert opened_reasoning(tokenizer, prompt) == opened
    sampled = HENS.removeprefix("<think>\n") if opened else HENS
    tokens = tokenizer(sampled, add_special_tokens=False)["input_ids"]
    completion = Completion([*tokens, tokenizer.eos_token_id], [0.0] * (len(tokens) + 1), True)
    [response] = responses_of(tokenizer, asked, prompt, [completion], 100)
    assert response.parts == parse(HENS, "boxed")
    assert response.text == opened + sampled
    # One that stops in the middle of the reasoning has neither summary nor answer, though it names a box.
    cut = tokenizer("so \\boxed{277}", add_special_tokens=False)["input_ids"]
    [response] = responses_of(tokenizer, asked, prompt, [Completion(cut, [0.0] * len(cut), False)], 100)
    assert response.parts.answer == (None if opened else "277")
    assert response.parts.reasoning == ("so \\boxed{277}" if opened else "")


def test_what_is_learnt_follows_the_prompt(templated):
    """Prompt and target together are the dialogue with one opening tag, whichever of the two it stands in."""
    tokenizer, opened = templated
    pairs = [{"messages": problem().messages, "completion": text} for text in (HENS, "Hello!")]
    examples, _ = tokenize(tokenizer, pairs, 1000)
    whole, greeting = (tokenizer.decode([*e.prompts[0], *e.rests[0]]) for e in examples)
    if "</think>\n\n<think>" not in whole:  # the template that closes the reasoning before the completion
        assert whole.count("<think>") == 1 and whole.endswith(HENS.partition("<think>\n")[2] + "<|end|>")
    assert greeting.count("<think>") == greeting.count("</think>") and greeting.endswith("Hello!<|end|>")
    text = tokenizer.decode(examples[0].rests[0], skip_special_tokens=True)
    assert parse(opened + text, "boxed") == parse(HENS, "boxed")


def test_continuation(tokenizer):
    assert continuation("", "<think>a") == "<think>a"
    assert continuation("<think>\n", "<think>\n\na") == "a"
    assert continuation("<think>\n", "<think>a") == "a"
    assert continuation("<think>", "<think>\na") == "\na"
    assert continuation("<think>\n", "Hello!") == "</think>\n\nHello!"
    assert tokenizer.decode(completion_tokens(tokenizer, "<think>\na", "<think>\n")) == "a<|end|>"


def test_a_question_that_ends_with_the_tag_opens_nothing(tokenizer):
    prompt = prompt_tokens(tokenizer, [{"role": "user", "content": "What is <think>"}], "chat")
    assert opened_reasoning(tokenizer, prompt) == ""
