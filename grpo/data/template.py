"""Prompt templates, and the parts of a completion: reasoning, summary and answer.

Departure from the paper: it gives the R1-Zero template in table 1; `ZERO_TEMPLATE` says the same in other words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from grpo.data.records import Message
from grpo.errors import InputError

if TYPE_CHECKING:  # reward workers parse completions and must not load transformers
    from transformers import PreTrainedTokenizerBase

Template = Literal["chat", "r1_zero"]
"""The tokenizer's chat template, or `ZERO_TEMPLATE`."""

ZERO_TEMPLATE = (
    "Below, a User asks and an Assistant solves. The Assistant first works the problem out between <think> and "
    "</think>, then gives only the result between <answer> and </answer>.\n"
    "User: {prompt}\nAssistant:"
)
"""Plain-text template for a base model, which knows no chat tokens (R1, table 1)."""

TAG = re.compile(r"</?(?:think|reasoning|answer)>")
STYLES = ("think", "reasoning")
"""Names of the reasoning tags; the answer's are always <answer> and </answer>."""
_REASONING = re.compile(r"<(think|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)


def tag_sequence(style: str) -> list[str]:
    """The four tags of a completion, in order."""
    return [f"<{style}>", f"</{style}>", "<answer>", "</answer>"]


@dataclass(frozen=True)
class Parts:
    """Parts of a completion. `summary` is what the user reads; `answer` is None if there is none.

    `well_formed`: one reasoning block, one answer block, both non-empty, and nothing around them.
    """

    reasoning: str
    summary: str
    answer: str | None
    well_formed: bool


def parse(completion: str) -> Parts:
    """Splits a completion at its tags; both <think> and <reasoning> are understood, over several lines."""
    tags = list(TAG.finditer(completion))
    if [tag[0] for tag in tags] in [tag_sequence(style) for style in STYLES]:
        before, reasoning, between, answer, after = (text.strip() for text in TAG.split(completion))
        if reasoning and answer and not (before or between or after):
            return Parts(reasoning, answer, answer, True)
    start, end = reasoning_span(completion)
    summary = re.split(r"</(?:think|reasoning)>", completion)[-1]
    return Parts(
        reasoning=completion[start:end].strip(),
        summary=re.sub(r"</?answer>", "", summary).strip(),
        answer=_last_answer(completion),
        well_formed=False,
    )


def reasoning_span(completion: str) -> tuple[int, int]:
    """Start and end of the first reasoning block, in characters and without its tags; (0, 0) if there is none.

    A block that is never closed extends to the end.
    """
    block = _REASONING.search(completion)
    return block.span(2) if block else (0, 0)


def _last_answer(completion: str) -> str | None:
    """The last closed answer block. `find` stays linear where a policy repeats one tag; a lazy pattern would not."""
    answer, start = None, completion.find("<answer>")
    while start >= 0 and (end := completion.find("</answer>", start)) >= 0:
        answer = completion[start + len("<answer>") : end].strip()
        start = completion.find("<answer>", end)
    return answer


def render(reasoning: str, answer: str) -> str:
    """Builds a well-formed completion; the inverse of `parse`."""
    return f"<think>\n{reasoning.strip()}\n</think>\n<answer>{answer.strip()}</answer>"


def zero_prompt(messages: list[Message], zero_template: str | None = None) -> str:
    """Fills the plain-text template with the user's messages."""
    question = "\n".join(m["content"] for m in messages if m["role"] == "user")
    return (zero_template or ZERO_TEMPLATE).replace("{prompt}", question)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: Template, zero_template: str | None = None
) -> list[int]:
    """Token ids of a prompt, including the generation prompt after which the completion begins."""
    if template == "r1_zero":
        ids = tokenizer(zero_prompt(messages, zero_template), add_special_tokens=False)["input_ids"]
        return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; add one, or use the template 'r1_zero'"
        )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast(list[int], ids)


def completion_tokens(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
    """Token ids of an assistant's turn with its end-of-sequence token: the targets of supervised training."""
    return [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
