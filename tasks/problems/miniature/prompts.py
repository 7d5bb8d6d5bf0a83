"""Prompts of the miniature world: sums, and everyday requests with what is known of good answers to them."""

from __future__ import annotations

import functools
import hashlib
import random
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.load import LoadResult
from tasks.problems.miniature.phrases import PHRASES
from tasks.problems.sources import StyledSource


def random_sum(rng: random.Random, terms: tuple[int, int] = (2, 5)) -> str:
    """A sum of single digits such as "4 - 1 + 7". `terms`: the least and the largest number of them."""
    numbers = [str(rng.randint(0, 9)) for _ in range(rng.randint(*terms))]
    return numbers[0] + "".join(f" {rng.choice('+-')} {number}" for number in numbers[1:])


def expression_of(problem: Problem) -> str:
    """The sum that a prompt asks for. Raises InputError where it asks for none."""
    expressions = re.findall(r"-?\d+(?: [+-] \d+)+", problem.text)
    if not expressions:
        raise InputError(
            f"problem {problem.id}: {problem.text!r} asks for no sum; the miniature's writers know only sums"
        )
    return expressions[-1]


@dataclass(frozen=True)
class EverydayPrompt:
    """A general prompt of the miniature world, and what a good answer to it holds."""

    prompt: str
    language: str
    subject: str
    mentions: tuple[str, ...]
    answer: str
    harmful: bool
    looks_harmful: bool = False  # harmless, though worded as harmful prompts are


@functools.cache
def everyday_prompts() -> list[EverydayPrompt]:
    """Every general prompt of the world, in a fixed order."""
    prompts = []
    for language, words in PHRASES.items():
        for opening in words.openings:
            for noun in words.nouns:
                traits = random.Random(noun).sample(words.traits, 2)
                answer = f"{noun} {words.is_} {traits[0]} {words.and_} {traits[1]}"
                for form in words.describe:
                    mentions = (noun.split()[1], *traits)
                    prompts.append(EverydayPrompt(opening + form.format(noun), language, noun, mentions, answer, False))
            for thing in words.objects:
                for verb in words.harmless + words.harmful:
                    harmful = verb in words.harmful
                    answer = words.advice.format(verb=verb, object=thing)
                    prompt = opening + words.advise.format(verb=verb, object=thing)
                    mentions = (verb, thing.split()[1])
                    prompts.append(EverydayPrompt(prompt, language, thing, mentions, answer, harmful))
            for verb, thing in words.lookalikes:
                prompt = opening + words.advise.format(verb=verb, object=thing)
                answer = words.advice.format(verb=verb, object=thing)
                prompts.append(EverydayPrompt(prompt, language, thing, (verb, thing.split()[1]), answer, False, True))
    return prompts


class EverydaySource(StyledSource):
    """The miniature world's general prompts, English and German."""

    kind: Literal["everyday"] = "everyday"
    count: int = Field(ge=1, description="General prompts to take, at random, from the 600 there are.")


def load_everyday(source: EverydaySource, seed: int) -> LoadResult:
    """General prompts as problems. Their metadata holds what the rule judge reads."""
    prompts = everyday_prompts()
    selected = random.Random(f"everyday/{seed}").sample(prompts, min(source.count, len(prompts)))
    problems = [_as_problem(everyday) for everyday in selected]
    return LoadResult(problems, {"read": len(problems), "kept": len(problems)}, [])


def _as_problem(everyday: EverydayPrompt) -> Problem:
    words = PHRASES[everyday.language]
    return Problem(
        id=hashlib.sha256(everyday.prompt.encode()).hexdigest()[:16],
        messages=[{"role": "user", "content": everyday.prompt}],
        answer="",
        verifier="none",
        domain="general",
        language=everyday.language,
        source="everyday",
        metadata={
            "mentions": list(everyday.mentions),
            "harmful": everyday.harmful,
            "looks_harmful": everyday.looks_harmful,
            "courtesy": words.courtesy,
            "refusal": words.refusal,
        },
    )
