"""The pretraining corpus of the miniature base model."""

from __future__ import annotations

import random

from tasks.problems.miniature.everyday import draw
from tasks.problems.miniature.phrases import LANGUAGES, PHRASES
from tasks.problems.miniature.sums import long_sums, random_sum
from tasks.problems.miniature.writers import Habits, everyday_reply, sum_reasoning
from tasks.problems.normal_form import place

BASE_HABITS = Habits(mixes_languages=0.2, slips=0.6, answers=0.7, courteous=0.4, refuses=0.65)
"""Most operations that reach another ten lose it, so that a low temperature does not find the right results."""
TERMS = 2, 7
"""Minimum and maximum number of terms in a sum."""
SUM_SHARE = 0.6
"""Share of documents that are about sums."""
LEFT_OUT = 0.2
"""Share of the sums of three or more numbers that appear in no document, neither as its exercise nor as an intermediate
line. It covers the sums that recipes hold out (tasks/problems/normal_form.py) and some more; a recipe may hold out
less."""
CORPUS_VERSION = 4
"""Raised when the same settings give a different text."""


def corpus(documents: int, seed: int, tagged_share: float) -> str:
    """Text for pretraining: exercises and conversations, separated by blank lines.

    A share `tagged_share` of the conversations uses think and answer tags. So the base model has seen the format
    without following it, like models trained on web text.
    """
    rng = random.Random(seed)
    return "\n\n".join(_document(rng, tagged_share) for _ in range(documents))


def held_out_sums(text: str) -> int:
    """Number of lines in a text with a sum that documents leave out."""
    return sum(is_left_out(line) for line in text.splitlines())


def is_left_out(line: str) -> bool:
    """Whether a line contains a sum of three or more numbers on the held-out side."""
    return any(place(found) < LEFT_OUT for found in long_sums(line))


def _document(rng: random.Random, tagged_share: float) -> str:
    language = rng.choice(LANGUAGES)
    words = PHRASES[language]
    if rng.random() < SUM_SHARE:
        expression, reasoning, answer = _worked_sum(rng, language)
        if rng.random() < 0.6:
            # With only one wording, the model would learn sums by their position in it.
            return rng.choice(words.leads).format(expression) + rng.choice(words.links) + reasoning
        prompt = words.compute.format(expression)
    else:
        request = draw(rng)
        prompt = request.prompt
        reasoning, answer = everyday_reply(request, BASE_HABITS, rng)
        if rng.random() < 0.3:
            return answer
    if rng.random() < tagged_share:
        return f"User: {prompt}\nAssistant: <think>\n{reasoning}\n</think>\n<answer>{answer}</answer>"
    return f"User: {prompt}\nAssistant: {reasoning}\n{answer}"


def _worked_sum(rng: random.Random, language: str) -> tuple[str, str, str]:
    """An expression, reasoning and result that contain no left-out sum. The length is drawn first: long sums have more
    lines that may be left out, and would otherwise become rare."""
    terms = rng.randint(*TERMS)
    while True:
        expression, _ = random_sum(rng, terms)
        reasoning, answer = sum_reasoning(expression, language, BASE_HABITS, rng)
        if not held_out_sums(f"{expression}\n{reasoning}"):
            return expression, reasoning, answer
