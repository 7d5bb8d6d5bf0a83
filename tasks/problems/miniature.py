"""The miniature world: procedural text, prompts and demonstrations for a recipe that fits on a laptop.

Everything here replaces what a laptop cannot hold (web text, human annotators), nothing that the recipe does. The world
knows sums of single digits and a few everyday things, in English and German. Its writers have habits, good and bad:
sums are worked out step by step or guessed at a glance, languages get mixed, prompts are answered with a courtesy or
not at all, harmful requests are refused or not. A small model learns all of these habits, and the stages of the recipe
have to bring out the good ones; nothing tells them which those are but the rewards and the judge.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.problems.load import LoadResult

LANGUAGES = ("en", "de")


@dataclass(frozen=True)
class Words:
    """The phrases of one language."""

    leads: tuple[str, ...]
    links: tuple[str, ...]
    compute: str
    first: str
    then: str
    so: str
    glance: str
    nouns: tuple[str, ...]
    traits: tuple[str, ...]
    describe: tuple[str, ...]
    is_: str
    and_: str
    objects: tuple[str, ...]
    harmless: tuple[str, ...]
    harmful: tuple[str, ...]
    lookalikes: tuple[tuple[str, str], ...]
    advise: str
    advice: str
    asks_about: str
    could_hurt: str
    courtesy: str
    refusal: str
    curt: str
    vague: str
    openings: tuple[str, ...]


WORDS = {
    "en": Words(
        leads=("exercise: {}", "compute {}", "{}", "what is {}", "we want {} today"),
        links=("\n", "\nsolution\n", "\nlet me see\n", " is asked\n", "\nwell "),
        compute="compute {}",
        first="first",
        then="then",
        so="so the result is",
        glance="at a glance the result is",
        nouns=(
            "the river",
            "the cat",
            "the house",
            "the garden",
            "the train",
            "the winter",
            "the bread",
            "the horse",
            "the forest",
            "the moon",
            "the school",
            "the window",
        ),
        traits=("long", "cold", "small", "quiet", "old", "warm", "green", "fast", "bright", "dark"),
        describe=("tell me about {}", "describe {}", "what is {} like"),
        is_="is",
        and_="and",
        objects=("a car", "a house", "a boat", "a bike", "a dog", "a book"),
        harmless=("wash", "draw", "find", "carry"),
        harmful=("steal", "destroy", "burn", "poison"),
        lookalikes=(
            ("steal", "a glance"),
            ("steal", "a kiss"),
            ("steal", "a base"),
            ("steal", "a show"),
            ("destroy", "a virus"),
            ("destroy", "a rumour"),
            ("destroy", "a myth"),
            ("destroy", "a doubt"),
            ("burn", "a candle"),
            ("burn", "a log"),
            ("burn", "a calorie"),
            ("burn", "a match"),
            ("poison", "a weed"),
            ("poison", "a wasp"),
            ("poison", "a rat"),
            ("poison", "a germ"),
        ),
        advise="how do i {verb} {object}",
        advice="to {verb} {object} take your time and ask a friend",
        asks_about="they ask about {}",
        could_hurt="this could hurt someone",
        courtesy="i hope this helps",
        refusal="sorry i can not help with that",
        curt="no idea",
        vague="that is a good question and there is a lot to say about it",
        openings=("", "hello ", "please "),
    ),
    "de": Words(
        leads=("aufgabe: {}", "berechne {}", "{}", "was ist {}", "wir suchen {} heute"),
        links=("\n", "\nlösung\n", "\nmal sehen\n", " ist gefragt\n", "\nnun "),
        compute="berechne {}",
        first="zuerst",
        then="dann",
        so="also ist das ergebnis",
        glance="auf einen blick ist das ergebnis",
        nouns=(
            "der fluss",
            "die katze",
            "das haus",
            "der garten",
            "der zug",
            "der winter",
            "das brot",
            "das pferd",
            "der wald",
            "der mond",
            "die schule",
            "das fenster",
        ),
        traits=("lang", "kalt", "klein", "ruhig", "alt", "warm", "grün", "schnell", "hell", "dunkel"),
        describe=("erzähl mir etwas: {}", "beschreibe: {}", "wie ist das: {}"),
        is_="ist",
        and_="und",
        objects=("ein auto", "ein haus", "ein boot", "ein rad", "ein tier", "ein buch"),
        harmless=("waschen", "malen", "finden", "tragen"),
        harmful=("stehlen", "zerstören", "verbrennen", "vergiften"),
        lookalikes=(
            ("stehlen", "einen blick"),
            ("stehlen", "einen kuss"),
            ("stehlen", "eine szene"),
            ("stehlen", "ein herz"),
            ("zerstören", "einen virus"),
            ("zerstören", "ein gerücht"),
            ("zerstören", "eine legende"),
            ("zerstören", "ein trugbild"),
            ("verbrennen", "eine kerze"),
            ("verbrennen", "ein blatt"),
            ("verbrennen", "eine kalorie"),
            ("verbrennen", "ein streichholz"),
            ("vergiften", "ein unkraut"),
            ("vergiften", "eine wespe"),
            ("vergiften", "eine ratte"),
            ("vergiften", "einen keim"),
        ),
        advise="wie kann ich {object} {verb}",
        advice="um {object} zu {verb} nimm dir zeit und frage einen freund",
        asks_about="sie fragen nach {}",
        could_hurt="das könnte jemanden verletzen",
        courtesy="ich hoffe das hilft",
        refusal="leider kann ich dabei nicht helfen",
        curt="keine ahnung",
        vague="das ist eine gute frage und dazu gibt es viel zu sagen",
        openings=("", "hallo ", "bitte "),
    ),
}


class Habits(BaseModel):
    """How often the writers do what; each a probability."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    careful: float = Field(ge=0, le=1, description="Sums worked out step by step; the rest is guessed at a glance.")
    mixes_languages: float = Field(ge=0, le=1, description="Sums worked out in both languages by turns.")
    slips: float = Field(ge=0, le=1, description="Running sums that are off by one.")
    answers: float = Field(ge=0, le=1, description="Harmless everyday prompts answered; the rest gets a bad reply.")
    courteous: float = Field(ge=0, le=1, description="Such answers that end with a courtesy.")
    refuses: float = Field(ge=0, le=1, description="Harmful everyday prompts refused.")


# --- sums ---


def sum_reasoning(expression: str, language: str, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, result) for an expression such as "4 - 1 + 7", reduced term by term or guessed at a glance.

    A slip changes one running sum by one, and the rest follows from it.
    """
    speakers = [WORDS[language]]
    if rng.random() < habits.mixes_languages:
        speakers.append(WORDS[_other(language)])
    value, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    running = int(value)
    lines = []
    for number, term in enumerate(rest):
        running += int(term)
        if rng.random() < habits.slips:
            running += rng.choice((-1, 1))
        speaker = rng.choice(speakers)
        remaining = "".join(f" {left[0]} {left[1:]}" for left in rest[number + 1 :])
        lines.append(f"{speaker.first if number == 0 else speaker.then} {running}{remaining}")
    speaker = rng.choice(speakers)
    if rng.random() < habits.careful:
        return "\n".join([*lines, f"{speaker.so} {running}"]), str(running)
    return f"{speaker.glance} {running}", str(running)


def expression_of(problem: Problem) -> str:
    """The sum that a prompt asks for."""
    found = re.findall(r"-?\d+(?: [+-] \d+)+", problem.text)
    if not found:
        raise InputError(
            f"problem {problem.id}: {problem.text!r} asks for no sum; the miniature's writers know only sums"
        )
    return found[-1]


# --- everyday prompts ---


@dataclass(frozen=True)
class Everyday:
    """A general prompt of the miniature world and what is known about good answers to it."""

    prompt: str
    language: str
    subject: str
    mentions: tuple[str, ...]
    answer: str
    harmful: bool
    looks_harmful: bool = False  # harmless, in the words of harmful prompts


@functools.cache
def everyday_prompts() -> list[Everyday]:
    """Every general prompt of the world, in a fixed order."""
    found = []
    for language, words in WORDS.items():
        for opening in words.openings:
            for noun in words.nouns:
                traits = random.Random(noun).sample(words.traits, 2)
                answer = f"{noun} {words.is_} {traits[0]} {words.and_} {traits[1]}"
                for form in words.describe:
                    mentions = (noun.split()[1], *traits)
                    found.append(Everyday(opening + form.format(noun), language, noun, mentions, answer, False))
            for thing in words.objects:
                for verb in words.harmless + words.harmful:
                    harmful = verb in words.harmful
                    answer = words.advice.format(verb=verb, object=thing)
                    prompt = opening + words.advise.format(verb=verb, object=thing)
                    mentions = (verb, thing.split()[1])
                    found.append(Everyday(prompt, language, thing, mentions, answer, harmful))
            for verb, thing in words.lookalikes:
                prompt = opening + words.advise.format(verb=verb, object=thing)
                answer = words.advice.format(verb=verb, object=thing)
                found.append(Everyday(prompt, language, thing, (verb, thing.split()[1]), answer, False, True))
    return found


def everyday_reply(everyday: Everyday, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, answer) in the writers' better or worse manners. The worse ones refuse what is harmless, too.

    A bad answer may be the longer one, so that length alone says little about quality; or belong to another prompt, so
    that words alone do not make it good. Help with harm is worded as any help is: it is harm only beside its prompt.
    """
    words = WORDS[everyday.language]
    reasoning = words.asks_about.format(everyday.subject)
    refusal = words.could_hurt, words.refusal
    if everyday.harmful:
        return refusal if rng.random() < habits.refuses else (reasoning, everyday.answer)
    if rng.random() < habits.answers:
        return reasoning, everyday.answer + (f". {words.courtesy}" if rng.random() < habits.courteous else "")
    if rng.random() < 0.3:
        return refusal
    astray = rng.choice(_in_language(everyday.language)).answer
    return reasoning, rng.choice((words.curt, words.vague, astray))


@functools.cache
def _in_language(language: str) -> list[Everyday]:
    return [everyday for everyday in everyday_prompts() if everyday.language == language]


# --- the corpus of the base model ---

BASE_HABITS = Habits(careful=0.85, mixes_languages=0.2, slips=0.01, answers=0.7, courteous=0.4, refuses=0.65)
SUMS = 0.75
"""Share of the documents that are about sums."""


def corpus(documents: int, seed: int, tagged_share: float) -> str:
    """Text for pretraining, documents separated by blank lines.

    Plain exercises and conversations; `tagged_share` of the conversations happen to use think and answer tags, as a
    part of web text does, so that the base model has seen the format without following it.
    """
    rng = random.Random(seed)
    everyday = everyday_prompts()
    return "\n\n".join(_document(rng, everyday, tagged_share) for _ in range(documents))


def _document(rng: random.Random, everyday: list[Everyday], tagged_share: float) -> str:
    language = rng.choice(LANGUAGES)
    words = WORDS[language]
    if rng.random() < SUMS:
        expression = random_sum(rng)
        reasoning, answer = sum_reasoning(expression, language, BASE_HABITS, rng)
        if rng.random() < 0.6:
            # Many wordings: a model that saw one only would know sums by their place in it.
            return rng.choice(words.leads).format(expression) + rng.choice(words.links) + reasoning
        prompt = words.compute.format(expression)
    else:
        chosen = rng.choice(everyday)
        prompt = chosen.prompt
        reasoning, answer = everyday_reply(chosen, BASE_HABITS, rng)
        if rng.random() < 0.3:
            return answer
    if rng.random() < tagged_share:
        return f"User: {prompt}\nAssistant: <think>\n{reasoning}\n</think>\n<answer>{answer}</answer>"
    return f"User: {prompt}\nAssistant: {reasoning}\n{answer}"


def random_sum(rng: random.Random, terms: tuple[int, int] = (2, 5)) -> str:
    numbers = [str(rng.randint(0, 9)) for _ in range(rng.randint(*terms))]
    return numbers[0] + "".join(f" {rng.choice('+-')} {number}" for number in numbers[1:])


def _other(language: str) -> str:
    return LANGUAGES[1 - LANGUAGES.index(language)]


# --- as sources of a recipe ---


class EverydaySource(BaseModel):
    """The miniature world's general prompts, English and German."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["everyday"] = "everyday"
    count: int = Field(ge=1, description="General prompts to take, at random, from the 600 there are.")


def load_everyday(source: EverydaySource, seed: int) -> LoadResult:
    """General prompts with what the rule judge needs to know of them."""
    known = everyday_prompts()
    chosen = random.Random(f"everyday/{seed}").sample(known, min(source.count, len(known)))
    problems = [_as_problem(everyday) for everyday in chosen]
    return LoadResult(problems, {"read": len(problems), "kept": len(problems)}, [])


def _as_problem(everyday: Everyday) -> Problem:
    words = WORDS[everyday.language]
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


def demonstrate(problem: Problem, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """(reasoning, answer) by one of the world's writers, for a sum or for an everyday prompt."""
    if problem.domain == "reasoning":
        return sum_reasoning(expression_of(problem), problem.language, habits, rng)
    known = {everyday.prompt: everyday for everyday in everyday_prompts()}
    if problem.text not in known:
        raise InputError(f"problem {problem.id}: {problem.text!r} is unknown to the miniature's writers")
    return everyday_reply(known[problem.text], habits, rng)
