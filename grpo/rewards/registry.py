"""The table of reward functions by name, users' own functions, their options, and running them. Does not import
torch."""

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
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.functions import (
    Response,
    accuracy,
    consistency,
    format_,
    format_soft,
    language,
    length,
    overlong,
    repetition,
    stated,
    tag_count,
)
from grpo.rewards.judged import JUDGED
from grpo.rewards.language import load as load_frequencies
from grpo.rewards.verifiers import QUICK, VERIFIERS


@dataclass(frozen=True)
class Reward:
    """A reward function, called as (problem, response, **options), and the domains of the problems it scores."""

    function: Callable[..., float]
    domains: tuple[str, ...] = ("reasoning", "general")
    quick: Callable[[Problem], bool] = lambda problem: False
    """Whether its time is linear in the length of a completion, typically microseconds; a group is then scored in one
    task."""
    verifiers: Callable[[str], bool] = lambda verifier: True
    """Whether it scores problems with this verifier."""

    def scores(self, problem: Problem) -> bool:
        """Whether it scores completions to the problem."""
        return problem.domain in self.domains and self.verifiers(problem.verifier)


def _always(problem: Problem) -> bool:
    return True


def _quickly_verified(problem: Problem) -> bool:
    return problem.verifier in QUICK


_STATED_IN_WORDS = set(VERIFIERS) - {"code", "none", *JUDGED}
"""Verifiers of results that a sentence can state: not of programs, and not of answers that only a judge can check."""


REWARDS: dict[str, Reward] = {
    "accuracy": Reward(accuracy, ("reasoning",), _quickly_verified, lambda verifier: verifier not in JUDGED),
    "stated": Reward(stated, ("reasoning",), _quickly_verified, lambda verifier: verifier in _STATED_IN_WORDS),
    "format": Reward(format_, quick=_always),
    "format_soft": Reward(format_soft, quick=_always),
    "tag_count": Reward(tag_count, quick=_always),
    "consistency": Reward(consistency, ("reasoning",)),
    "language": Reward(language, quick=_always),
    "length": Reward(length, quick=_always),
    "overlong": Reward(overlong, quick=_always),
    "repetition": Reward(repetition, quick=_always),
}
"""Rewards by name. The domains are R1's branches (stage 4): only its own branch's rewards score a completion."""

MODEL_REWARDS = ("helpful", "safe")
"""Scored by reward models, on general prompts only; see grpo/scoring/reward_model.py."""

JUDGE_REWARDS = ("judge", "rubric")
"""Scored by a judge, on prompts with a reference or a rubric; see grpo/scoring/judge_rewards.py."""


def find(name: str) -> Reward:
    """Returns the reward of this name, or a user's function "module:function", which scores every domain.

    A user's function that always takes microseconds may set the attribute `function.quick = True`. Raises InputError
    for an unknown name.
    """
    if ":" in name:
        function = import_function(name)
        return Reward(function, quick=_always) if getattr(function, "quick", False) else Reward(function)
    if name in REWARDS:
        return REWARDS[name]
    if name in MODEL_REWARDS + JUDGE_REWARDS:
        raise InputError(f"reward {name!r} is scored by a model and has no function")
    known = [*REWARDS, *MODEL_REWARDS, *JUDGE_REWARDS]
    close = difflib.get_close_matches(name, known)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    raise InputError(f"unknown reward {name!r}; {hint} (or give a function of your own as module:function)")


def import_function(name: str) -> Callable[..., Any]:
    """Imports the function "module:function". Raises InputError if that fails or the name is not callable.

    The working directory is searched too; installed commands do not have it on their path.
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
    return typing.cast(Callable[..., Any], function)


def source_digest(name: str) -> str:
    """SHA-256 of the source file of a user's "module:function"; artifact keys contain it."""
    function = import_function(name)
    return hashlib.sha256(Path(inspect.getsourcefile(function) or "").read_bytes()).hexdigest()


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raises InputError unless `name` is a reward that takes these options with values of its declared types."""
    if name in MODEL_REWARDS + JUDGE_REWARDS:
        if options:
            raise InputError(f"reward {name!r} comes from a model and takes no option {next(iter(options))!r}")
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
    except Exception:  # a user's annotations may be unresolvable; options are then unchecked
        return {}


def load(names: Sequence[str]) -> None:
    """Imports the modules and tables of these rewards, so that this does not count towards the first completion's time
    limit."""
    for name in names:
        if name not in MODEL_REWARDS + JUDGE_REWARDS:
            find(name)
    if "language" in names:
        load_frequencies()


def score_one(name: str, options: Mapping[str, Any], problem: Problem, response: Response) -> float:
    """Score of one completion by one reward. Raises ValueError unless the function returns a finite number."""
    value = find(name).function(problem, response, **options)
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"reward {name!r} gave {value!r}, which is no finite number")
    return float(value)


def score_many(
    rewards: Mapping[str, Mapping[str, Any]], problem: Problem, responses: Iterable[Response]
) -> list[dict[str, float]]:
    """Scores of several completions by several rewards (name -> options), one dict per completion."""
    return [{n: score_one(n, options, problem, response) for n, options in rewards.items()} for response in responses]


def total(breakdown: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted sum of a breakdown; `weights` has an entry for every reward in it."""
    return sum(weights[name] * value for name, value in breakdown.items())
