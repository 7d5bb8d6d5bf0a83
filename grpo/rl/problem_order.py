"""The order of problems: mixes sources, applies a curriculum by pass rate, and can be resumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.config.curriculum import Curriculum
from grpo.config.jobs import RLJob
from grpo.config.rl import RL
from grpo.data.permutation import permutation
from grpo.data.records import Problem, read_problems
from grpo.data.template import prompted_by
from grpo.errors import InputError
from grpo.scoring.sandbox_walls import check_walls

ALL = ""


class ProblemOrder:
    """Orders the problems of one domain.

    Each pass over a source is a new permutation, determined by the seed. With `weights` (source -> relative
    frequency), every prefix of the order has the sources in these proportions, up to rounding to whole problems.
    Without weights, all problems form one source.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        weights: Mapping[str, float] | None = None,
        curriculum: Curriculum | None = None,
    ):
        self.seed, self.curriculum = seed, curriculum
        self.weights = dict(weights) if weights else {ALL: 1.0}
        self.sources = {name: [p for p in problems if name in (ALL, p.source)] for name in self.weights}
        for name, of_source in self.sources.items():
            if not of_source:
                known = ", ".join(sorted({p.source for p in problems}))
                raise InputError(f"source_weights: no problems of source {name!r}; sources here: {known}")
        self.positions = dict.fromkeys(self.sources, 0)
        self.taken = dict.fromkeys(self.sources, 0)
        self.asked: dict[str, int] = {}  # problem id -> the pass in which it was last taken, under a curriculum
        self.resting: dict[str, int] = {}  # problem id -> the pass from which it is used again

    def take(self, count: int) -> list[Problem]:
        return [self._next(self._due_source()) for _ in range(count)]

    def observe(self, problem: Problem, pass_rate: float) -> None:
        """Records the share of completions that solved the problem, 0 to 1."""
        if self.curriculum is None or problem.id not in self.asked:  # an earlier version did not record them
            return
        if self.curriculum.min_pass_rate < pass_rate < self.curriculum.max_pass_rate:
            return
        self.resting[problem.id] = self.asked[problem.id] + 1 + self.curriculum.rest

    def state(self) -> dict[str, Any]:
        passes = {"asked": dict(self.asked), "resting": dict(self.resting)}
        return {"positions": dict(self.positions), "taken": dict(self.taken), **passes}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. Earlier versions' states have no "asked"."""
        self.positions, self.taken, self.resting = (dict(state[k]) for k in ("positions", "taken", "resting"))
        self.asked = dict(state.get("asked", {}))

    def _due_source(self) -> str:
        return min(self.sources, key=lambda name: (self.taken[name] + 1) / self.weights[name])

    def _next(self, source: str) -> Problem:
        self.taken[source] += 1
        problems = self.sources[source]
        for _ in range(len(problems)):
            epoch, index = divmod(self.positions[source], len(problems))
            problem = problems[permutation(len(problems), f"{self.seed}/{source}/{epoch}")[index]]
            self.positions[source] += 1
            if self.resting.get(problem.id, 0) <= epoch:
                break  # if all problems are skipped, take an easy one rather than none
        if self.curriculum is not None:
            self.asked[problem.id] = epoch
        return problem


def make_orders(job: RLJob) -> dict[str, ProblemOrder]:
    """Returns the problem order of each domain. Raises InputError if a domain that the job trains on has no problems.

    If programs would run without the sandbox's isolation, warns or raises, depending on the job's settings."""
    settings = job.settings
    problems = prompted_by(read_problems(job.problems), job.template, job.zero_template)
    check_walls(problems, settings.scoring)
    by_domain: dict[str, list[Problem]] = {"reasoning": [], "general": []}
    for problem in problems:
        by_domain[problem.domain].append(problem)
    only_general = settings.general_share == 1 and settings.general_last_steps == settings.steps
    needed = [*([] if only_general else ["reasoning"]), *(["general"] if settings.general_last_steps else [])]
    for domain in needed:
        if not by_domain[domain]:
            raise InputError(f"{job.problems[0]}: no {domain} problems here, but this job trains on them")
    return {
        domain: ProblemOrder(
            by_domain[domain],
            job.seed,
            settings.source_weights if domain == "reasoning" else None,
            settings.curriculum if domain == "reasoning" else None,
        )
        for domain in needed
    }


def problems_of_rollout(orders: Mapping[str, ProblemOrder], settings: RL, step: int, minibatches: int) -> list[Problem]:
    """Takes the problems of a rollout that starts at `step`, counted from 0. Each inner epoch makes an update with each
    minibatch. Adds general prompts only for the last steps (R1, stage 4): to as many minibatches as these have."""
    chosen: list[Problem] = []
    end = min(step + minibatches * settings.inner_epochs, settings.steps)
    last_updates = end - max(step, settings.steps - settings.general_last_steps)
    reasoning_only = minibatches - max(0, math.ceil(last_updates / settings.inner_epochs))
    for number in range(minibatches):
        share = settings.general_share if number >= reasoning_only else 0.0
        general = math.ceil(settings.prompts_per_step * share)
        if reasoning := settings.prompts_per_step - general:
            chosen += orders["reasoning"].take(reasoning)
        if general:
            chosen += orders["general"].take(general)
    return chosen
