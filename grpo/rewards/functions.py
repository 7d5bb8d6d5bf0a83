"""Rewards: plain functions that score one completion; weighting is kept apart from scoring.

A reward reads one problem and one completion, never the group. It runs in a light process that can be killed, so
nothing here loads torch. What a function raises is counted as a failure by whoever runs it, never taken for a score.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import math
import numbers
import os
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from grpo.data.records import Problem
from grpo.data.template import Parts
from grpo.errors import InputError
from grpo.rewards.language import language_consistency
from grpo.rewards.language import load as load_frequencies
from grpo.rewards.text import conclusions, repeated_share, single_tags, tags_in_order
from grpo.rewards.verifiers import QUICK, agree, verify


@dataclass(frozen=True)
class Response:
    """What a reward reads of one completion."""

    text: str  # the whole completion, without special tokens
    parts: Parts  # grpo.data.template.parse(text)
    tokens: int  # length with the end mark
    finished: bool  # it ended by itself
    max_tokens: int  # the longest length allowed


def accuracy(problem: Problem, response: Response) -> float:
    """The verifier's verdict on the answer, 0..1; no answer block, no reward."""
    return verify(problem, response.parts.answer)


def format_(problem: Problem, response: Response) -> float:
    """1 if reasoning and answer are tagged as asked and nothing stands around them, else 0 (R1; scale unpublished)."""
    return float(response.parts.well_formed)


def format_soft(problem: Problem, response: Response) -> float:
    """1 if the four tags occur in their order, whatever stands around them or occurs besides, else 0."""
    return float(tags_in_order(response.text))


def tag_count(problem: Problem, response: Response) -> float:
    """Share of the four tags that occur exactly once: 0, 0.25, 0.5, 0.75 or 1. Order does not matter."""
    return single_tags(response.text)


def consistency(problem: Problem, response: Response) -> float:
    """1 if the reasoning's own conclusion is the answer given, right or wrong, by the problem's rule; else 0.

    What counts as its conclusion says `text_rewards.conclusions`. Without one, or without an answer: 0.
    """
    answer = response.parts.answer
    return float(bool(answer) and any(agree(problem, answer or "", c) for c in conclusions(response.parts.reasoning)))


def language(problem: Problem, response: Response) -> float:
    """Share of the reasoning's words in the problem's language (R1, stage 2); no reasoning, no reward."""
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
    """Minus `per_token` for each token that the completion is away from `shortest`..`longest`; 0 within, unbounded.

    The linear form of L1-Exact (arXiv 2503.04697), which has one target length, for a range. The default, 0..0, makes
    every token cost. (Kimi k1.5's length reward compares within a group, which a reward does not see.)
    """
    away = max(shortest - response.tokens, response.tokens - max(shortest, longest), 0)
    return -per_token * away if away else 0.0


def overlong(problem: Problem, response: Response, *, cache_tokens: Annotated[int, Field(ge=1)] | None = None) -> float:
    """0 up to `cache_tokens` before the longest length, then linearly down to -1 at it (DAPO, eq. 13).

    A completion that was cut off scores -1. None: a fifth of the longest length, as DAPO's 4,096 of 20,480.
    """
    cache = cache_tokens or max(response.max_tokens // 5, 1)
    over = response.tokens - (response.max_tokens - cache)
    if not response.finished or over >= cache:
        return -1.0
    return -over / cache if over > 0 else 0.0


def repetition(problem: Problem, response: Response, *, n: Annotated[int, Field(ge=1)] = 4) -> float:
    """Minus the share of n-grams that occurred before in the completion, -1..0; fewer than n words: 0."""
    return -repeated_share(response.text, n) or 0.0  # no -0.0


@dataclass(frozen=True)
class Reward:
    """A reward's function, called as (problem, response, **options), and the domains of the problems it scores."""

    function: Callable[..., float]
    domains: tuple[str, ...] = ("reasoning", "general")
    quick: Callable[[Problem], bool] = lambda problem: False
    """Whether it takes microseconds whatever the completion is: then those of a group are scored in one go."""


def _always(problem: Problem) -> bool:
    return True


REWARDS: dict[str, Reward] = {
    "accuracy": Reward(accuracy, ("reasoning",), quick=lambda problem: problem.verifier in QUICK),
    "format": Reward(format_, quick=_always),
    "format_soft": Reward(format_soft, quick=_always),
    "tag_count": Reward(tag_count, quick=_always),
    "consistency": Reward(consistency, ("reasoning",)),
    "language": Reward(language, quick=_always),
    "length": Reward(length, quick=_always),
    "overlong": Reward(overlong, quick=_always),
    "repetition": Reward(repetition, quick=_always),
}
"""By name. The domains are R1's branches (stage 4): a sample is scored by its own only."""

MODEL_REWARDS = ("helpful", "safe")
"""Scored by reward models, on general prompts only; see grpo/scoring/scorer.py."""


def find(name: str) -> Reward:
    """The reward of this name, or a user's own as "module:function", which scores problems of every domain. A function
    that always takes microseconds can say so by an attribute, `function.quick = True`.

    Raises InputError if there is none.
    """
    if ":" in name:
        function = import_function(name)
        return Reward(function, quick=_always) if getattr(function, "quick", False) else Reward(function)
    if name in REWARDS:
        return REWARDS[name]
    if name in MODEL_REWARDS:
        raise InputError(f"reward {name!r} is scored by a reward model and has no function")
    close = difflib.get_close_matches(name, [*REWARDS, *MODEL_REWARDS])
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join([*REWARDS, *MODEL_REWARDS])}"
    raise InputError(f"unknown reward {name!r}; {hint} (or give a function of your own as module:function)")


def import_function(name: str) -> Callable[..., Any]:
    """What "module:function" names. Raises InputError if it cannot be imported or is no function.

    Modules beside the user, in the working directory, are found too: installed commands do not look there themselves.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise InputError(f"{name!r}: cannot import module {module_name!r} ({type(error).__name__}: {error})") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{name!r}: module {module_name!r} has no function {function_name!r}")
    return function


def source_digest(name: str) -> str:
    """SHA-256 of the file that a user's "module:function" stands in: its code decides what a run makes."""
    function = import_function(name)
    return hashlib.sha256(Path(inspect.getsourcefile(function) or "").read_bytes()).hexdigest()


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raises InputError unless `name` is a reward that takes these options, with values of the types it declares."""
    if name in MODEL_REWARDS:
        if options:
            raise InputError(f"reward {name!r} comes from a reward model and takes no option {next(iter(options))!r}")
        return
    function = find(name).function
    try:
        signature = inspect.signature(function)
        signature.bind(None, None)
    except (TypeError, ValueError):
        if not options:
            raise InputError(f"reward {name!r} must be callable as (problem, response)") from None
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        takes = [p.name for p in list(signature.parameters.values())[2:] if p.kind is not p.VAR_KEYWORD]
        raise InputError(f"reward {name!r}: {error}; its options are {', '.join(takes) or 'none'}") from None
    hints = _hints(function)
    for option, value in options.items():
        try:
            TypeAdapter(hints.get(option, Any)).validate_python(value, strict=not isinstance(value, int))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(f"reward {name!r}, option {option!r}: {reason}, but it is {value!r}") from None


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # a user's annotations need not be resolvable; then there is nothing to check against
        return {}


def load(names: Sequence[str]) -> None:
    """Imports what these rewards are defined in, and reads what they look up: done first in a process, it costs no
    completion any of its time."""
    for name in names:
        if name not in MODEL_REWARDS:
            find(name)
    if "language" in names:
        load_frequencies()


def score_one(name: str, options: Mapping[str, Any], problem: Problem, response: Response) -> float:
    """One reward of one completion. Raises ValueError if the function gives anything but a finite number."""
    value = find(name).function(problem, response, **options)
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"reward {name!r} gave {value!r}, which is no finite number")
    return float(value)


def score_many(
    rewards: Mapping[str, Mapping[str, Any]], problem: Problem, responses: Iterable[Response]
) -> list[dict[str, float]]:
    """Several rewards (name -> options) of several completions."""
    return [{n: score_one(n, options, problem, response) for n, options in rewards.items()} for response in responses]


def total(breakdown: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted sum of a breakdown; `weights` names every reward in it."""
    return sum(weights[name] * value for name, value in breakdown.items())
