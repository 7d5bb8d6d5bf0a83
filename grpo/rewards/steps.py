"""Process supervision by rule: a reward for each step of the reasoning (DSM 4.1.3).

The paper uses a trained model. `grpo.training.process_reward_model` trains one; give its folder in place of a rule's
name.

A step is a line. If a rule finds nothing to judge in a step, the step has no reward: any number would either reward
filler or penalize prose.
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
from collections.abc import Callable

from grpo.data.records import Problem
from grpo.data.template import reasoning_span
from grpo.errors import InputError
from grpo.rewards.arithmetic import Side, agree, chains, value
from grpo.rewards.registry import import_function

StepReward = Callable[[Problem, str], float | None]
"""(problem, the step's text) -> its reward, or None if there is nothing to judge."""


def equations(problem: Problem, step: str) -> float | None:
    """1 if every equation in the step is true arithmetic, 0 if one is false: "8 - 1 = 7", "2 * 3 = 6 = 12 / 2".

    Values are exact; a decimal number may be rounded. Sides with variables, units or functions are not judged; a step
    with no equation that can be judged has no reward.
    """
    pairs = [pair for chain in chains(step) for pair in itertools.pairwise(chain)]
    verdicts = [agree(left, right) for left, right in pairs if left.value is not None and right.value is not None]
    return float(all(verdicts)) if verdicts else None


def reduction(problem: Problem, step: str) -> float | None:
    """1 if the step's last expression or number still has the gold answer's value, else 0.

    For calculations that are simplified step by step to their result: "5 + 3 - 1", "8 - 1" and "7" all have the value
    7. A step without arithmetic has no reward. Raises InputError if the gold answer is not a number.
    """
    gold = value(problem.answer.strip())
    if gold is None:
        raise InputError(
            f"problem {problem.id}: step reward 'reduction' needs a number as gold answer, not {problem.answer!r}; "
            "use 'equations' or a function of your own"
        )
    readable = [side for chain in chains(step) for side in chain[-1:] if side.value is not None]
    return float(agree(readable[-1], Side(gold))) if readable else None


STEP_REWARDS: dict[str, StepReward] = {"equations": equations, "reduction": reduction}


def is_folder(name: str) -> bool:
    """Whether a step reward is the path of a model folder, which begins with ".", "/" or "~"."""
    return name.startswith((".", "/", "~"))


def find(name: str) -> StepReward:
    """The step reward of this name, or a user's function "module:function". Raises InputError if there is none."""
    if ":" in name:
        return import_function(name)
    if name in STEP_REWARDS:
        return STEP_REWARDS[name]
    close = difflib.get_close_matches(name, STEP_REWARDS)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(STEP_REWARDS)}"
    raise InputError(f"unknown step reward {name!r}; {hint} (or give a function of your own as module:function)")


def split_steps(text: str) -> list[tuple[int, int]]:
    """The steps of a completion: start and end, in characters of `text`, of each line of its reasoning.

    Omits blank lines and white space around a line. Without think tags there are no steps.
    """
    start, end = reasoning_span(text)
    steps = []
    for line in text[start:end].splitlines(keepends=True):
        if line.strip():
            first = start + len(line) - len(line.lstrip())
            steps.append((first, first + len(line.strip())))
        start += len(line)
    return steps


def step_rewards(name: str, problem: Problem, text: str) -> list[tuple[int, float]]:
    """The end of each judged step of a completion, in characters of `text`, and the step's reward.

    Raises ValueError if the step reward returns anything but a finite number or None.
    """
    function = find(name)
    rewards: list[tuple[int, float]] = []
    for start, end in split_steps(text):
        reward = function(problem, text[start:end])
        if reward is None:
            continue
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise ValueError(f"step reward {name!r} gave {reward!r}, which is no finite number")
        rewards.append((end, float(reward)))
    return rewards
