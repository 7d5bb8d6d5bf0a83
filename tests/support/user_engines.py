"""Engines of a user's own; jobs name them as module:function."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo.config.common import Sampling
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem


class Adder:
    """Knows the answer to "What is a + b?" and is right as often as the sampling temperature says.

    R1FLOW_TEST_ASKED names a file that tells what was asked, R1FLOW_TEST_PAUSE_S how long a problem takes.
    """

    identity = "adder 1"

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        for index, (problem, seed) in reversed([*enumerate(zip(problems, seeds, strict=True))]):
            time.sleep(float(os.environ.get("R1FLOW_TEST_PAUSE_S", 0)))
            if "R1FLOW_TEST_ASKED" in os.environ:
                with Path(os.environ["R1FLOW_TEST_ASKED"]).open("a") as file:
                    file.write(json.dumps([problem.id, count]) + "\n")
            chance = random.Random(seed)
            yield index, TextCompletions([self._text(problem, chance, sampling) for _ in range(count)], prompt_tokens=7)

    def _text(self, problem: Problem, chance: random.Random, sampling: Sampling) -> TextCompletion:
        wrong = chance.random() >= sampling.temperature
        answer = int(problem.answer or 0) + (chance.randint(1, 9) if wrong else 0)
        steps = "".join(f"step {chance.randint(0, 9)}\n" for _ in range(3))
        return TextCompletion(f"<think>\n{steps}</think>\n<answer>{answer}</answer>", tokens=20, finished=True)

    def close(self) -> None:
        pass


def adder() -> Adder:
    return Adder()
