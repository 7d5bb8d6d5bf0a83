"""Asking problems: a process's share of them is sampled and scored, at once or while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo.config.jobs import RLJob
from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.data.template import prompt_tokens
from grpo.distributed.process_group import Parallel, divide
from grpo.generation.engines import Engine, Fed
from grpo.generation.sampler import seed_of
from grpo.rl.model_set import Models
from grpo.scoring.scorer import Scorer, Scores, responses_of

Answers = dict[int, tuple[list[Completion], Scores]]
"""Number of a problem -> its completions and their scores, which may be in the making."""


@dataclass
class Asked:
    """Problems that were put to the sampler; `mine`: numbers of those that this process answers."""

    step: int
    version: int  # of the weights
    problems: list[Problem]
    prompts: list[list[int]]
    mine: list[int]
    shares: list[list[int]]  # of all processes
    answers: Future[Answers] = field(default_factory=Future)


class Generation:
    """An engine and a scorer at work for one job."""

    def __init__(self, job: RLJob, engine: Engine, models: Models, tokenizer: Any, scorer: Scorer, parallel: Parallel):
        self.job, self.tokenizer, self.scorer, self.parallel = job, tokenizer, scorer, parallel
        self.engine, self._fed = engine, Fed(engine, models)

    def ask(self, problems: Sequence[Problem], step: int, draw: tuple[int, ...], *, beside: bool = False) -> Asked:
        """All processes call it together. Completions depend on the weights, the problems and `draw` alone.

        `beside`: return at once and go on in a thread, which uses nothing of the trainer's but its scorer.
        """
        asked = self._share(problems, step, self._fed.feed())
        seeds = [seed_of(self.job.seed, *draw, number) for number in asked.mine]
        if beside:
            threading.Thread(target=self._answer_beside, args=(asked, seeds), daemon=True).start()
        else:
            asked.answers.set_result(self._answer(asked, seeds))
            self.engine.sleep()
        return asked

    def _share(self, problems: Sequence[Problem], step: int, version: int) -> Asked:
        job, longest = self.job, self.job.settings.max_new_tokens(step)
        prompts = [prompt_tokens(self.tokenizer, p.messages, job.template, job.zero_template) for p in problems]
        shares = divide([len(prompt) + longest for prompt in prompts], self.parallel.world)
        return Asked(step, version, [*problems], prompts, shares[self.parallel.rank], shares)

    def _answer_beside(self, asked: Asked, seeds: list[int]) -> None:
        try:
            asked.answers.set_result(self._answer(asked, seeds))
        except BaseException as error:
            asked.answers.set_exception(error)

    def _answer(self, asked: Asked, seeds: list[int]) -> Answers:
        settings = self.job.settings
        sampling = settings.sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens(asked.step)})
        prompts = [asked.prompts[number] for number in asked.mine]
        answers: Answers = {}
        for place, completions in self.engine.sample(prompts, settings.group_size, sampling, seeds):
            # Scoring goes on in other processes while other groups are sampled and the models measure.
            number = asked.mine[place]
            answers[number] = completions, self._score(asked, number, completions)
        return answers

    def _score(self, asked: Asked, number: int, completions: list[Completion]) -> Scores:
        longest = self.job.settings.max_new_tokens(asked.step)
        return self.scorer.start(asked.problems[number], responses_of(self.tokenizer, completions, longest))

    def close(self) -> None:
        self.engine.close()

    def state(self, asked: Asked, version: int) -> dict[str, Any]:
        """What was asked with all answers, as plain data. Waits for them; all processes call it together."""
        answers = asked.answers.result()
        mine = {n: [(c.tokens, c.logprobs, c.finished) for c in completions] for n, (completions, _) in answers.items()}
        everyones = [answer for share in self.parallel.gather(mine) for answer in share.items()]
        return {
            "step": asked.step,
            "age": version - asked.version,
            "problems": [problem.id for problem in asked.problems],
            "completions": dict(sorted(everyones)),
        }

    def restore(self, state: dict[str, Any], version: int, problems: dict[str, Problem]) -> Asked:
        """The inverse, for any number of processes; what was sampled is scored again."""
        asked = self._share([problems[name] for name in state["problems"]], state["step"], version - state["age"])
        found = {number: [Completion(*of) for of in state["completions"][number]] for number in asked.mine}
        asked.answers.set_result(
            {n: (completions, self._score(asked, n, completions)) for n, completions in found.items()}
        )
        return asked
