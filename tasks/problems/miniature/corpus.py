"""The corpus that the miniature base model is pretrained on."""

from __future__ import annotations

import random

from tasks.problems.miniature.phrases import LANGUAGES, PHRASES
from tasks.problems.miniature.prompts import EverydayPrompt, everyday_prompts, random_sum
from tasks.problems.miniature.writers import Habits, everyday_reply, sum_reasoning

BASE_HABITS = Habits(careful=0.85, mixes_languages=0.2, slips=0.01, answers=0.7, courteous=0.4, refuses=0.65)
SUM_SHARE = 0.75
"""Share of the documents that are about sums."""


def corpus(documents: int, seed: int, tagged_share: float) -> str:
    """Text for pretraining: exercises and conversations, separated by blank lines.

    A share `tagged_share` of the conversations uses think and answer tags, so that the base model has seen the format
    without following it, as models trained on web text have.
    """
    rng = random.Random(seed)
    everyday = everyday_prompts()
    return "\n\n".join(_document(rng, everyday, tagged_share) for _ in range(documents))


def _document(rng: random.Random, everyday: list[EverydayPrompt], tagged_share: float) -> str:
    language = rng.choice(LANGUAGES)
    words = PHRASES[language]
    if rng.random() < SUM_SHARE:
        expression = random_sum(rng)
        reasoning, answer = sum_reasoning(expression, language, BASE_HABITS, rng)
        if rng.random() < 0.6:
            # With a single wording, the model would learn sums by their position in it.
            return rng.choice(words.leads).format(expression) + rng.choice(words.links) + reasoning
        prompt = words.compute.format(expression)
    else:
        request = rng.choice(everyday)
        prompt = request.prompt
        reasoning, answer = everyday_reply(request, BASE_HABITS, rng)
        if rng.random() < 0.3:
            return answer
    if rng.random() < tagged_share:
        return f"User: {prompt}\nAssistant: <think>\n{reasoning}\n</think>\n<answer>{answer}</answer>"
    return f"User: {prompt}\nAssistant: {reasoning}\n{answer}"
