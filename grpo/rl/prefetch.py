"""Sampling and scoring of a process's share of the problems: immediately, or in the background while the policy
trains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo.config.common import Sampling
from grpo.config.jobs import RLJob
from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.data.template import prompt_tokens
from grpo.distributed.process_group import Parallel, divide
from grpo.generation.engines import Engine, SyncedEngine
from grpo.generation.sampler import seed_of
from grpo.rl.model_set import Models
from grpo.scoring.scorer import Scorer, Scores, responses_of

ScoredCompletions = dict[int, tuple[list[Completion], Scores]]
"""Index of a problem -> its completions and their scores, which may still be pending."""


@dataclass
class RolloutRequest:
    """Problems to sample completions of."""

    step: int
    version: int  # of the weights that sample
    problems: list[Problem]
    prompts: list[list[int]]
    mine: list[int]  # indices of the problems that this process samples
    shares: list[list[int]]  # the same for every process
    sampling: Sampling
    completions: int  # per problem
    logprobs: bool  # whether they are trained on
    results: Future[ScoredCompletions] = field(default_factory=Future)


class Prefetcher:
    """Runs one job's engine and scorer on rollout requests."""

    def __init__(self, job: RLJob, engine: Engine, models: Models, tokenizer: Any, scorer: Scorer, parallel: Parallel):
        self.job, self.tokenizer, self.scorer, self.parallel = job, tokenizer, scorer, parallel
        self.engine, self._synced = engine, SyncedEngine(engine, models)

    def sample(
        self,
        problems: Sequence[Problem],
        step: int,
        draw: tuple[int, ...],
        *,
        background: bool = False,
        sampling: Sampling | None = None,
        completions: int | None = None,
        logprobs: bool = True,
    ) -> RolloutRequest:
        """Samples completions. All processes must call it together. The completions depend only on the weights, the
        problems and `draw`.

        `background`: return immediately and sample in a thread, which shares only the scorer with the trainer.
        `sampling` and `completions` (per problem) default to the job's. `logprobs`: whether log-probabilities are
        needed.
        """
        request = self._share(problems, step, self._synced.sync(), sampling, completions, logprobs)
        seeds = [seed_of(self.job.seed, *draw, number) for number in request.mine]
        if background:
            threading.Thread(target=self._fill, args=(request, seeds), daemon=True).start()
        else:
            request.results.set_result(self._sample_share(request, seeds))
            self.engine.sleep()
        return request

    def _share(
        self,
        problems: Sequence[Problem],
        step: int,
        version: int,
        sampling: Sampling | None = None,
        completions: int | None = None,
        logprobs: bool = True,
    ) -> RolloutRequest:
        job, settings = self.job, self.job.settings
        sampling = sampling or settings.sampling.model_copy(update={"max_new_tokens": settings.max_new_tokens(step)})
        longest, completions = sampling.max_new_tokens, completions or settings.group_size
        prompts = [prompt_tokens(self.tokenizer, p.messages, job.template, job.zero_template) for p in problems]
        shares = divide([len(prompt) + longest for prompt in prompts], self.parallel.world)
        mine = shares[self.parallel.rank]
        return RolloutRequest(step, version, [*problems], prompts, mine, shares, sampling, completions, logprobs)

    def _fill(self, request: RolloutRequest, seeds: list[int]) -> None:
        try:
            self.parallel.use_device()
            request.results.set_result(self._sample_share(request, seeds))
        except BaseException as error:
            request.results.set_exception(error)

    def _sample_share(self, request: RolloutRequest, seeds: list[int]) -> ScoredCompletions:
        prompts = [request.prompts[number] for number in request.mine]
        results: ScoredCompletions = {}
        for position, completions in self.engine.sample(
            prompts, request.completions, request.sampling, seeds, logprobs=request.logprobs
        ):
            # Other processes score them while the next groups are sampled.
            number = request.mine[position]
            results[number] = completions, self._score(request, number, completions)
        return results

    def _score(self, request: RolloutRequest, number: int, completions: list[Completion]) -> Scores:
        problem, longest = request.problems[number], request.sampling.max_new_tokens
        responses = responses_of(self.tokenizer, problem, request.prompts[number], completions, longest)
        return self.scorer.start(problem, responses)

    def close(self) -> None:
        self.engine.close()

    def state(self, request: RolloutRequest, version: int) -> dict[str, Any]:
        """Returns the request with all its completions as plain data. Waits for them. All processes must call it
        together."""
        results = request.results.result()
        mine = {n: [(c.tokens, c.logprobs, c.finished) for c in completions] for n, (completions, _) in results.items()}
        gathered = [result for share in self.parallel.all_gather(mine) for result in share.items()]
        return {
            "step": request.step,
            "age": version - request.version,
            "problems": [problem.id for problem in request.problems],
            "completions": dict(sorted(gathered)),
        }

    def restore(self, state: dict[str, Any], version: int, problems: dict[str, Problem]) -> RolloutRequest:
        """The inverse of `state`, with any number of processes. Scores the completions again."""
        request = self._share([problems[name] for name in state["problems"]], state["step"], version - state["age"])
        groups = {number: [Completion(*of) for of in state["completions"][number]] for number in request.mine}
        request.results.set_result({n: (group, self._score(request, n, group)) for n, group in groups.items()})
        return request
