"""Prompt templates, and the forms of completions: reasoning, summary and answer.

Difference from the paper: `ZERO_TEMPLATE` says the same as the R1-Zero template in table 1, in other words.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from grpo.data.records import Message, Problem
from grpo.errors import InputError

if TYPE_CHECKING:  # reward workers parse completions and must not load transformers
    from transformers import PreTrainedTokenizerBase

Template = Literal["chat", "r1_zero"]
"""The tokenizer's chat template, or `ZERO_TEMPLATE`."""

AnswerStyle = Literal["tags", "boxed", "auto"]
r"""How a completion marks its answer, after the reasoning in think tags.

- tags: ``<answer>...</answer>`` and nothing else (R1-Zero).
- boxed: a summary for the reader, whose last ``\boxed{}`` is the answer (R1 from its cold start on).
- auto: tags if there is an answer block, else boxed. For models that were trained elsewhere.
"""

STYLE_FIELD = "answer_style"
"""Field of a problem's metadata with its style; absent for "tags".

The style belongs to the problem, not to a stage: whatever reads an answer has the problem available, one set may hold
problems of several styles, and every artifact made from the problems depends on it. The only exception is a plain-text
template, because it tells the model which form to use (`prompted_by`). So R1-Zero answers in tags and its successors in
boxes, on the same problems.
"""

ZERO_TEMPLATE = (
    "Below, a User asks and an Assistant solves. The Assistant first works the problem out between <think> and "
    "</think>, then gives only the result between <answer> and </answer>.\n"
    "User: {prompt}\nAssistant:"
)
"""Plain-text template for a base model, which does not know chat tokens (R1, table 1)."""

BOXED_ZERO_TEMPLATE = (
    "Below, a User asks and an Assistant solves. The Assistant first works the problem out between <think> and "
    "</think>, then sums up for the User and puts the result into \\boxed{}.\n"
    "User: {prompt}\nAssistant:"
)
"""The same template for style boxed; `base.zero_template = "boxed"` in a recipe."""

TAG = re.compile(r"</?(?:think|reasoning|answer)>")
STYLES = ("think", "reasoning")
"""Names of the reasoning tags; the answer tags are always <answer> and </answer>."""
_REASONING = re.compile(r"<(think|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_OPENING = re.compile(r"<(?:think|reasoning)>")
_CLOSING = re.compile(r"</(?:think|reasoning)>")
BOX = re.compile(r"\\boxed ?\{")
_ESCAPE_OR_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBOXED = ("code", "judge", "rubric", "none")
"""Verifiers of answers that do not fit into a box, such as programs: in style boxed they read the whole summary."""


def tag_sequence(style: str) -> list[str]:
    """The four tags of a completion, in order."""
    return [f"<{style}>", f"</{style}>", "<answer>", "</answer>"]


@dataclass(frozen=True)
class Parts:
    """Parts of a completion. `summary` is what the user reads; `answer` is None if there is none.

    `well_formed`: one reasoning block with words in it, then the summary and answer that the style requires, and
    nothing else.
    """

    reasoning: str
    summary: str
    answer: str | None
    well_formed: bool


@dataclass(frozen=True)
class AnswerForm:
    r"""The form of completions to a problem: its style, and whether the answer goes into a box.

    `whole`: without answer tags the answer is the whole summary, because there is nothing to box (programs, general
    prompts).
    """

    style: AnswerStyle = "tags"
    whole: bool = False

    def parse(self, completion: str) -> Parts:
        """Splits a completion. Reasoning is never part of the summary, and an answer inside it does not count."""
        tagged = self.style == "tags" or (self.style == "auto" and "</answer>" in after_reasoning(completion))
        return _parse_tags(completion) if tagged else self._parse_summary(completion)

    def render(self, reasoning: str, answer: str, summary: str = "") -> str:
        """Builds a well-formed completion; the inverse of `parse`. `summary`: words around the boxed answer. If they
        contain no box, only the box is written, because it is unknown where the answer belongs."""
        if self.style == "tags":
            return f"<think>\n{reasoning.strip()}\n</think>\n<answer>{answer.strip()}</answer>"
        if self.whole:
            summary = summary or answer
        elif last_box(summary) is None:
            summary = f"\\boxed{{{answer.strip()}}}"
        return f"<think>\n{reasoning.strip()}\n</think>\n\n{summary.strip()}"

    def _parse_summary(self, completion: str) -> Parts:
        start, end = reasoning_span(completion)
        reasoning, summary = completion[start:end].strip(), after_reasoning(completion).strip()
        answer = (summary or None) if self.whole else last_box(summary)
        tags = [tag for tag in TAG.findall(completion) if "answer" not in tag]
        well_formed = (
            tags in [tag_sequence(style)[:2] for style in STYLES]
            and completion.lstrip().startswith(tags[0])
            and has_words(reasoning)
            and answer is not None
            and is_visible(answer)
        )
        return Parts(reasoning, summary, answer, well_formed)


def form_of(problem: Problem) -> AnswerForm:
    """The form of completions to a problem. Raises InputError for an unknown style."""
    style = problem.metadata.get(STYLE_FIELD) or "tags"
    if style not in get_args(AnswerStyle):
        known = ", ".join(get_args(AnswerStyle))
        raise InputError(f"problem {problem.id}: {STYLE_FIELD} is {style!r}; known are {known}")
    return AnswerForm(cast(AnswerStyle, style), problem.verifier in _UNBOXED)


def with_style(problem: Problem, style: AnswerStyle) -> Problem:
    """The problem with this style, unless it has its own. The default, tags, is not stored."""
    if style == "tags" or problem.metadata.get(STYLE_FIELD):
        return problem
    return dataclasses.replace(problem, metadata={**problem.metadata, STYLE_FIELD: style})


def prompted_by(problems: Sequence[Problem], template: Template, zero_template: str | None = None) -> list[Problem]:
    """The problems in the style that the template asks for: a plain-text template that mentions answer tags or a box
    overrides the problem's own style."""
    text = (zero_template or ZERO_TEMPLATE) if template == "r1_zero" else ""
    asked = "tags" if "<answer>" in text else "boxed" if "\\boxed" in text else None
    if asked is None:
        return [*problems]
    return [
        p if form_of(p).style == asked else dataclasses.replace(p, metadata={**p.metadata, STYLE_FIELD: asked})
        for p in problems
    ]


def parse(completion: str, style: AnswerStyle = "tags") -> Parts:
    """Splits a completion when its problem is not available."""
    return AnswerForm(style).parse(completion)


def render(reasoning: str, answer: str) -> str:
    """Builds a well-formed completion of style tags."""
    return AnswerForm().render(reasoning, answer)


def _parse_tags(completion: str) -> Parts:
    tags = list(TAG.finditer(completion))
    if [tag[0] for tag in tags] in [tag_sequence(style) for style in STYLES]:
        before, reasoning, between, answer, after = (text.strip() for text in TAG.split(completion))
        if has_words(reasoning) and is_visible(answer) and not (before or between or after):
            return Parts(reasoning, answer, answer, True)
    start, end = reasoning_span(completion)
    summary = after_reasoning(completion)
    return Parts(
        reasoning=completion[start:end].strip(),
        summary=re.sub(r"</?answer>", "", summary).strip(),
        answer=_last_answer(summary),
        well_formed=False,
    )


def reasoning_span(completion: str) -> tuple[int, int]:
    """Start and end of the first reasoning block, in characters and without its tags; (0, 0) if there is none.

    A block that is never closed extends to the end.
    """
    block = _REASONING.search(completion)
    return block.span(2) if block else (0, 0)


def after_reasoning(completion: str) -> str:
    """The text after the last reasoning block; "" if the block is never closed, the whole text if there is none."""
    end = max((tag.end() for tag in _CLOSING.finditer(completion)), default=0)
    return _OPENING.split(completion[end:], maxsplit=1)[0]


def last_box(text: str) -> str | None:
    r"""The content of the last closed ``\boxed{}``; None if there is none. Boxes inside a box belong to its content."""
    return next(iter([*_boxes(text)][-1:]), None)


def _boxes(text: str) -> Iterator[str]:
    """Contents of the outermost boxes. Reads every character once, even if many boxes are never closed."""
    end = 0
    while box := BOX.search(text, end):
        depth = 1
        for brace in _ESCAPE_OR_BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                yield text[box.end() : brace.start()].strip()
                end = brace.end()
                break
        else:
            return


def has_words(text: str) -> bool:
    """Whether there is a visible letter or digit."""
    return any(c.isalnum() and c not in _BLANK for c in text)


def is_visible(text: str) -> bool:
    """Whether the text has a visible character, beyond white space, zero-width and control characters."""
    return any(c not in _BLANK and unicodedata.category(c)[0] not in "CZ" for c in text)


_BLANK = "\u115f\u1160\u2800\u3164\uffa0\U00013441\U00013442"
"""Letters and symbols without ink: Hangul fillers, the blank Braille pattern, blank hieroglyphs."""


def _last_answer(text: str) -> str | None:
    """The last closed answer block. `find` stays linear if a policy repeats one tag; a lazy pattern would not."""
    answer, start = None, text.find("<answer>")
    while start >= 0 and (end := text.find("</answer>", start)) >= 0:
        answer = text[start + len("<answer>") : end].strip()
        start = text.find("<answer>", end)
    return answer


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
    return prompts_tokens(tokenizer, [messages])[0]


def prompts_tokens(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[Message]]) -> list[list[int]]:
    """Token ids of prompts by the chat template, on all cores if the tokenizer is a fast one."""
    if tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; add one, or use the template 'r1_zero'"
        )
    ids = tokenizer.apply_chat_template([*conversations], add_generation_prompt=True, tokenize=True, return_dict=False)
    return cast(list[list[int]], ids)


def opened_reasoning(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> str:
    r"""The opening tag, such as ``<think>\n``, with which a prompt ends; "" if it does not end with one.

    Chat templates of DeepSeek-R1's distillates and of Qwen3's thinking models end this way, and the model continues
    inside the reasoning. The tag is prepended to what was sampled, so that a completion as text is always complete.
    """
    end = cast(str, tokenizer.decode([*prompt[-16:]]))
    tag = [*_OPENING.finditer(end)][-1:]
    return end[tag[0].start() :] if tag and not end[tag[0].end() :].strip() else ""


def continuation(opened: str, completion: str) -> str:
    """The part of a complete completion that follows a prompt ending with the tag `opened`. A completion without
    reasoning closes the tag first."""
    tag = opened.strip()
    if not tag:
        return completion
    if not completion.startswith(tag):
        return f"{tag.replace('<', '</')}\n\n{completion}"
    return completion.removeprefix(tag).lstrip() if opened != tag else completion.removeprefix(tag)


def completion_tokens(tokenizer: PreTrainedTokenizerBase, completion: str, opened: str = "") -> list[int]:
    """Token ids of an assistant turn and its end (the SFT targets), after a prompt that ends with the tag `opened`."""
    return completions_tokens(tokenizer, [completion], [opened])[0]


def completions_tokens(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[str], opened: Sequence[str]
) -> list[list[int]]:
    """Like `completion_tokens`, for many completions, each with its tag, on all cores."""
    rests = [*map(continuation, opened, completions)]
    tokens = tokenizer(rests, add_special_tokens=False)["input_ids"] if rests else []
    return [[*ids, tokenizer.eos_token_id] for ids in cast(list[list[int]], tokens)]
