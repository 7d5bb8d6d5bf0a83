"""Writers of the miniature world: they answer its prompts with reasoning, with good and bad habits."""

from __future__ import annotations

import functools
import random

from pydantic import BaseModel, ConfigDict, Field

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.miniature.everyday import EverydayPrompt, everyday_prompts
from tasks.problems.miniature.everyday_phrases import EVERYDAY
from tasks.problems.miniature.phrases import LANGUAGES, PHRASES
from tasks.problems.miniature.sums import expression_of, step


class Habits(BaseModel):
    """Probabilities of what the writers do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mixes_languages: float = Field(ge=0, le=1, description="Sums worked out in alternating languages.")
    slips: float = Field(ge=0, le=1, description="Operations that lose the ten they reach: 17 + 5 becomes 12.")
    answers: float = Field(ge=0, le=1, description="Harmless everyday prompts answered; the rest get a bad reply.")
    courteous: float = Field(ge=0, le=1, description="Such answers that end with a polite phrase.")
    refuses: float = Field(ge=0, le=1, description="Harmful everyday prompts refused.")


def demonstrate(problem: Problem, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, answer) to a sum or an everyday prompt, by a writer with these habits.

    Raises InputError for a prompt that is not from the miniature world.
    """
    if problem.domain == "reasoning":
        return sum_reasoning(expression_of(problem), problem.language, habits, rng)
    if problem.text not in _by_text():
        raise InputError(f"problem {problem.id}: {problem.text!r} is unknown to the miniature's writers")
    return everyday_reply(_by_text()[problem.text], habits, rng)


def sum_reasoning(expression: str, language: str, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, result) for an expression such as "17 + (4 + 3) - 6", reduced one operation a line.

    A slip loses the ten of one result; the rest follows from it.
    """
    speakers = [PHRASES[language]]
    if rng.random() < habits.mixes_languages:
        speakers.append(PHRASES[_other(language)])
    lines: list[str] = []
    left = expression
    while " " in left:
        left = step(left, loses_ten=rng.random() < habits.slips)
        speaker = rng.choice(speakers)
        lines.append(f"{speaker.then if lines else speaker.first} {left}")
    return "\n".join([*lines, f"{rng.choice(speakers).so} {left}"]), left


def everyday_reply(everyday: EverydayPrompt, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, answer) to an everyday prompt, good or bad by chance. Bad replies also refuse harmless prompts.

    A bad answer may be longer than a good one, so that length says little about quality. Or it may belong to another
    prompt, so that wording alone does not make it good. Help with harm is worded like any other help: only its prompt
    makes it harmful.
    """
    words = EVERYDAY[everyday.language]
    reasoning = words.asks_about.format(everyday.subject)
    refusal = words.could_hurt, words.refusal
    if everyday.harmful:
        return refusal if rng.random() < habits.refuses else (reasoning, everyday.answer)
    if rng.random() < habits.answers:
        return reasoning, everyday.answer + (f". {words.courtesy}" if rng.random() < habits.courteous else "")
    if rng.random() < 0.3:
        return refusal
    off_topic = rng.choice(_in_language(everyday.language)).answer
    return reasoning, rng.choice((words.curt, words.vague, off_topic))


@functools.cache
def _by_text() -> dict[str, EverydayPrompt]:
    return {everyday.prompt: everyday for everyday in everyday_prompts()}


@functools.cache
def _in_language(language: str) -> list[EverydayPrompt]:
    return [everyday for everyday in everyday_prompts() if everyday.language == language]


def _other(language: str) -> str:
    return LANGUAGES[1 - LANGUAGES.index(language)]
