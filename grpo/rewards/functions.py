"""Rewards: plain functions that score one completion. `grpo.rewards.registry` names them; weighting is separate.

A reward reads one problem and one completion, never the group. It runs in a worker process that may be killed, and
nothing here imports torch. A function should raise on unexpected input: the caller counts that as a failure, not as a
score.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from grpo.data.records import Problem
from grpo.data.template import TAG, AnswerForm, Parts, form_of
from grpo.rewards.language import language_consistency
from grpo.rewards.text import conclusions, marks_in_order, repeated_ngram_share, single_marks
from grpo.rewards.verifiers import agree, verify


@dataclass(frozen=True)
class Response:
    """One completion as a reward reads it."""

    text: str  # the whole completion, without special tokens
    parts: Parts  # of the text, parsed in the problem's answer form
    tokens: int  # length, including the end-of-sequence token
    finished: bool  # ended with the end token, not at the length limit
    max_tokens: int  # length limit

    @classmethod
    def to(cls, problem: Problem, text: str, tokens: int, finished: bool, max_tokens: int) -> Response:
        """Creates a response from a completion to the problem, split into its parts."""
        return cls(text, form_of(problem).parse(text), tokens, finished, max_tokens)


def accuracy(problem: Problem, response: Response) -> float:
    """The verifier's score of the answer, 0..1; 0 without an answer block."""
    return verify(problem, response.parts.answer)


def stated(problem: Problem, response: Response) -> float:
    """The verifier's score of the last result that the completion states in any form: accuracy without a format
    requirement, 0..1.

    Uses the answer in tags or in a box if there is one, else what `grpo.rewards.text.conclusions` finds, such as "so
    the result is 7". Ignores what a base model writes after it has opened another turn. Reads the reasoning as well:
    an answer that stands only there counts. That makes it a measure of what a model can do, not a reward to train on.
    """
    text = re.split(r"\nUser:", response.text, maxsplit=1)[0]
    marked = AnswerForm("auto").parse(text).answer
    readings = [marked] if marked else conclusions(TAG.sub(" ", text))
    return max((verify(problem, reading) for reading in readings), default=0.0)


def format_(problem: Problem, response: Response) -> float:
    """1 if reasoning and answer are marked as the problem's answer style requires, else 0 (R1; scale unpublished).

    tags: both in their tags, and no text outside. boxed: reasoning in its tags, then a summary that contains a box or,
    for programs and general prompts, any summary.
    """
    return float(response.parts.well_formed)


def format_soft(problem: Problem, response: Response) -> float:
    """1 if the marks of the answer style (four tags, or two and a box) occur in order, with any text around them, else
    0."""
    return float(marks_in_order(response.text, form_of(problem)))


def tag_count(problem: Problem, response: Response) -> float:
    """Share of the answer style's marks that occur exactly once: of four tags 0, 0.25, 0.5, 0.75 or 1. Order does not
    matter."""
    return single_marks(response.text, form_of(problem))


def consistency(problem: Problem, response: Response) -> float:
    """1 if the answer equals the reasoning's own conclusion, correct or not, by the problem's verifier; else 0.

    `grpo.rewards.text.conclusions` defines the conclusion. 0 without a conclusion or without an answer.
    """
    answer = response.parts.answer
    return float(bool(answer) and any(agree(problem, answer or "", c) for c in conclusions(response.parts.reasoning)))


def language(problem: Problem, response: Response) -> float:
    """Share of the reasoning's words in the problem's language (R1, stage 2), 0..1; 0 without reasoning."""
    reasoning = response.parts.reasoning
    return language_consistency(reasoning, problem.language) if reasoning else 0.0


def length(
    problem: Problem,
    response: Response,
    *,
    shortest: Annotated[int, Field(ge=0)] = 0,
    longest: Annotated[int, Field(ge=0)] = 0,
    per_token: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.0003,
) -> float:
    """Minus `per_token` for each token outside the range `shortest`..`longest`; 0 inside it. No lower bound.

    The linear form of L1-Exact (arXiv 2503.04697), with a range in place of one target length. The default range, 0..0,
    penalises every token. (Kimi k1.5's length reward compares completions of a group, which a reward does not see.)
    """
    distance = max(shortest - response.tokens, response.tokens - max(shortest, longest), 0)
    return -per_token * distance if distance else 0.0


def overlong(problem: Problem, response: Response, *, cache_tokens: Annotated[int, Field(ge=1)] | None = None) -> float:
    """0 until `cache_tokens` before the length limit, then linearly down to -1 at the limit (DAPO, eq. 13).

    A truncated completion scores -1. `cache_tokens=None` means a fifth of the limit, as DAPO's 4,096 of 20,480.
    """
    cache = cache_tokens or max(response.max_tokens // 5, 1)
    over = response.tokens - (response.max_tokens - cache)
    if not response.finished or over >= cache:
        return -1.0
    return -over / cache if over > 0 else 0.0


def repetition(problem: Problem, response: Response, *, n: Annotated[int, Field(ge=1)] = 4) -> float:
    """Minus the share of n-grams that occurred earlier in the completion, -1..0; 0 for fewer than n words."""
    return -repeated_ngram_share(response.text, n) or 0.0  # no -0.0
