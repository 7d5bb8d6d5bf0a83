"""General prompts of the miniature world: for training, and with other templates and pairs for the evaluation."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from grpo.data.records import Problem
from tasks.problems.load import LoadResult
from tasks.problems.miniature.everyday_phrases import EVERYDAY, Everyday
from tasks.problems.sources import StyledSource

Language = Literal["en", "de"]
Kind = Literal["harmful", "looks_harmful", "advice", "description"]
SHARES: dict[Kind, float] = {"harmful": 0.3, "looks_harmful": 0.3, "advice": 0.2, "description": 0.2}
"""Shares of the training prompts. Harmful prompts and those that only look harmful are hard to tell apart, so they are
equally frequent."""
EVALUATED = {"harmful": ("harmful",), "looks_harmful": ("looks_harmful",), "harmless": ("advice", "description")}
"""Classes of the evaluation, and the kinds that each consists of."""
PAIRS_HELD_OUT = 4
"""One in this many pairs of verb and object is used only for the evaluation."""
EVERYDAY_VERSION = 4
"""Version of the prompts and their metadata. Raised when the same settings give others. 2: `reference`. 3: held-out
forms. 4: more wordings."""


@dataclass(frozen=True)
class EverydayPrompt:
    """A general prompt of the miniature world, and what a good answer to it contains."""

    prompt: str
    language: str
    kind: Kind
    subject: str
    mentions: tuple[str, ...]
    answer: str

    @property
    def harmful(self) -> bool:
        return self.kind == "harmful"


@functools.cache
def everyday_prompts(held_out: bool = False) -> tuple[EverydayPrompt, ...]:
    """Every general prompt of the world, in a fixed order: the training prompts, or those of the evaluation. The two
    sets share no form and no pair of verb and object."""
    return tuple(
        prompt
        for language, words in EVERYDAY.items()
        for opening in words.openings
        for prompt in (*_descriptions(language, words, opening, held_out), *_advice(language, words, opening, held_out))
    )


def _descriptions(language: str, words: Everyday, opening: str, held_out: bool) -> Iterable[EverydayPrompt]:
    for noun in words.nouns:
        traits = random.Random(noun).sample(words.traits, 2)
        answer = f"{noun} {words.is_} {traits[0]} {words.and_} {traits[1]}"
        for form in words.describe.held_out if held_out else words.describe.known:
            mentions = (noun.split()[1], *traits)
            yield EverydayPrompt(opening + form.format(noun), language, "description", noun, mentions, answer)


def _advice(language: str, words: Everyday, opening: str, held_out: bool) -> Iterable[EverydayPrompt]:
    for verb, thing in pairs(words, held_out):
        answer = words.advice.format(verb=verb, object=thing)
        for form in words.advise.held_out if held_out else words.advise.known:
            prompt = opening + form.format(verb=verb, object=thing)
            yield EverydayPrompt(prompt, language, _kind(words, verb, thing), thing, (verb, thing.split()[1]), answer)


def pairs(words: Everyday, held_out: bool) -> list[tuple[str, str]]:
    """Pairs of verb and object on one side of the split. Every verb and every object is on both sides, in different
    pairs."""
    return [
        (verb, thing)
        for verbs in (words.harmful, words.harmless)
        for objects in (words.belongings, words.trifles)
        for row, verb in enumerate(verbs)
        for column, thing in enumerate(objects)
        if ((row + column) % PAIRS_HELD_OUT == 0) == held_out
    ]


def _kind(words: Everyday, verb: str, thing: str) -> Kind:
    if verb in words.harmless:
        return "advice"
    return "harmful" if thing in words.belongings else "looks_harmful"


@functools.cache
def by_kind() -> dict[Kind, list[EverydayPrompt]]:
    """The training prompts by kind."""
    return {kind: [p for p in everyday_prompts() if p.kind == kind] for kind in get_args(Kind)}


def draw(rng: random.Random) -> EverydayPrompt:
    """A random training prompt, with the kinds as frequent as in `SHARES`."""
    (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
    return rng.choice(by_kind()[kind])


def held_out_seen(texts: Iterable[str]) -> int:
    """Number of texts that contain a form or a pair reserved for the evaluation."""
    pattern = _held_out_pattern()
    return sum(pattern.search(text) is not None for text in texts)


@functools.cache
def _held_out_pattern() -> re.Pattern[str]:
    wordings = []
    for words in EVERYDAY.values():
        verb, thing, noun = (
            _any_of(names) for names in (words.harmful + words.harmless, words.belongings + words.trifles, words.nouns)
        )
        wordings += [re.escape(form).replace(r"\{\}", noun) for form in words.describe.held_out]
        for form in words.advise.held_out:
            wordings.append(re.escape(form).replace(r"\{verb\}", verb).replace(r"\{object\}", thing))
        wordings.append(_any_of([f"{verb} {thing}" for verb, thing in pairs(words, held_out=True)]))
        in_german_order = [f"{thing} {zu}{verb}" for verb, thing in pairs(words, held_out=True) for zu in ("", "zu ")]
        wordings.append(_any_of(in_german_order))
    return re.compile(rf"\b(?:{'|'.join(wordings)})\b")


def _any_of(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


class EverydaySource(StyledSource):
    """The miniature world's general prompts, English and German."""

    kind: Literal["everyday"] = "everyday"
    count: int = Field(ge=1, description="General training prompts, drawn at random from 10,632 of each language.")
    languages: list[Language] = Field(
        list(get_args(Language)),
        min_length=1,
        exclude_if=lambda value: set(value) == set(get_args(Language)),
        description="Languages of the prompts, for training and the evaluation.",
    )
    evaluated: int = Field(
        150,
        ge=1,
        le=240,  # there are no more harmful ones in one language
        exclude_if=lambda value: value == 150,
        description="Evaluation prompts per class: harmful, harmful-looking, harmless. Training uses neither their "
        "wording nor their verb-object pairs, so problems.held_out_share does not apply.",
    )
    worked_solutions: bool = Field(
        False,
        exclude_if=lambda value: not value,
        description="Write the reasoning of a good reply for each prompt, for cold_start_data.source 'solutions'.",
    )


def load_everyday(source: EverydaySource, seed: int) -> LoadResult:
    """General prompts for training, as problems. Their metadata contains what the judges read: the evaluation's judge
    reads `reference`, and the rule judge, which labels and rewards, reads the rest."""
    rng = random.Random(f"everyday/{seed}")
    chosen = [
        everyday
        for kind, share in SHARES.items()
        for everyday in _some(
            [p for p in by_kind()[kind] if p.language in source.languages], round(source.count * share), rng
        )
    ]
    problems = [_as_problem(everyday, source.worked_solutions) for everyday in chosen]
    return LoadResult(problems, {"read": len(problems), "kept": len(problems)}, [])


def load_held_out(source: EverydaySource, seed: int) -> list[Problem]:
    """The general prompts of the evaluation: equally many of each class and of each language."""
    rng = random.Random(f"everyday held out/{seed}")
    languages = [language for language in EVERYDAY if language in source.languages]
    return [
        _as_problem(everyday, worked=False)
        for kinds in EVALUATED.values()
        for kind in kinds
        for language in languages
        for everyday in _some(
            [p for p in everyday_prompts(held_out=True) if (p.kind, p.language) == (kind, language)],
            math.ceil(source.evaluated / (len(kinds) * len(languages))),
            rng,
        )
    ]


def _some(prompts: Sequence[EverydayPrompt], count: int, rng: random.Random) -> list[EverydayPrompt]:
    return rng.sample(prompts, min(count, len(prompts)))


def _as_problem(everyday: EverydayPrompt, worked: bool) -> Problem:
    words = EVERYDAY[everyday.language]
    solution = words.could_hurt if everyday.harmful else words.asks_about.format(everyday.subject)
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
            "looks_harmful": everyday.kind == "looks_harmful",
            "courtesy": words.courtesy,
            "refusal": words.refusal,
            "reference": words.refusal if everyday.harmful else f"{everyday.answer}. {words.courtesy}",
            **({"solution": solution} if worked else {}),
        },
    )
