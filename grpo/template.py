"""How a prompt becomes tokens, and how a completion is taken apart.

Departure from the paper: its template for R1-Zero is a table's text; `ZERO_TEMPLATE` says the same in other words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from grpo.config import ZERO_TEMPLATE, Template
from grpo.data import Message
from grpo.errors import InputError

_TAGGED = re.compile(
    r"\A\s*<(think|reasoning)>(?P<reasoning>.*?)</\1>\s*<answer>(?P<answer>.*?)</answer>\s*\Z", re.DOTALL
)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_REASONING = re.compile(r"<(think|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Parts:
    """A completion taken apart. `summary` is what the user reads; `answer` is None where none was given."""

    reasoning: str
    summary: str
    answer: str | None
    well_formed: bool


def parse(completion: str) -> Parts:
    """Split a completion at its tags; both <think> and <reasoning> are understood, over several lines.

    Well-formed means: one reasoning block, one answer block, both non-empty, nothing around them.
    """
    if match := _TAGGED.match(completion):
        reasoning, answer = match["reasoning"].strip(), match["answer"].strip()
        if reasoning and answer and not re.search(r"</?(think|reasoning|answer)>", reasoning + answer):
            return Parts(reasoning, answer, answer, True)
    answers = _ANSWER.findall(completion)
    thought = _REASONING.search(completion)
    summary = re.split(r"</(?:think|reasoning)>", completion)[-1]
    return Parts(
        reasoning=thought[2].strip() if thought else "",
        summary=re.sub(r"</?answer>", "", summary).strip(),
        answer=answers[-1].strip() if answers else None,
        well_formed=False,
    )


def render(reasoning: str, answer: str) -> str:
    """The completion that `parse` takes apart again."""
    return f"<think>\n{reasoning.strip()}\n</think>\n<answer>{answer.strip()}</answer>"


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: Template, zero_template: str | None = None
) -> list[int]:
    """Token ids of a prompt, up to and including the mark after which the completion begins."""
    if template == "r1_zero":
        text = (zero_template or ZERO_TEMPLATE).replace(
            "{prompt}", "\n".join(m["content"] for m in messages if m["role"] == "user")
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; add one, or use the template 'r1_zero'"
        )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast(list[int], ids)


def completion_tokens(tokenizer: PreTrainedTokenizerBase, completion: str) -> list[int]:
    """Token ids of an assistant's turn with its end mark: what supervised training predicts."""
    return [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
