"""Scores of reward models, and the full reward breakdown of completions."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo.config.common import Hardware
from grpo.config.jobs import MEMBER
from grpo.config.rl import Scoring
from grpo.data.completions import Completion
from grpo.data.records import Message, Problem
from grpo.data.template import parse
from grpo.errors import InputError, TrainingStopped
from grpo.model.loading import load_reward_model, load_tokenizer
from grpo.model.packed.attention import hidden_states
from grpo.model.packed.packing import pack, shared_prefix
from grpo.processes.pool import Failure, Pool
from grpo.rewards.functions import MODEL_REWARDS, Response, find, load, score_many, score_one
from grpo.rewards.steps import is_folder, step_rewards

if TYPE_CHECKING:
    from grpo.training.process_reward_model import StepScorer


def responses_of(tokenizer: Any, completions: Sequence[Completion], max_tokens: int) -> list[Response]:
    """Sampled completions as rewards read them; `max_tokens` is the longest that they could be."""
    texts = tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
    return [
        Response(text, parse(text), len(c.tokens), c.finished, max_tokens)
        for text, c in zip(texts, completions, strict=True)
    ]


def conversation_tokens(tokenizer: Any, messages: list[Message], response: str) -> list[int]:
    """Token ids of a prompt and the response to it: what a reward model reads, in training and in scoring."""
    turns = [*messages, {"role": "assistant", "content": response}]
    return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)


class RewardModelScorer:
    """A trained reward model, or an ensemble of them."""

    def __init__(self, path: str, hardware: Hardware, batch_size: int = 64, uncertainty_penalty: float = 0.0):
        """`path`: a model's folder, or one with a folder of each member in it."""
        members = member_folders(path)
        self.tokenizer = load_tokenizer(members[0])
        self.models = [load_reward_model(member, hardware) for member in members]
        self.batch_size, self.uncertainty_penalty = batch_size, uncertainty_penalty

    @torch.inference_mode()
    def __call__(self, messages: Sequence[list[Message]], responses: Sequence[str]) -> list[float]:
        """One score a response, unbounded, higher is better."""
        rows = [conversation_tokens(self.tokenizer, m, r) for m, r in zip(messages, responses, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            of_members = torch.stack([score_rows(model, batch) for model in self.models])
            scores += ensemble_score(of_members, self.uncertainty_penalty).tolist()
        return scores


def member_folders(path: str) -> list[str]:
    """The models of an ensemble's folder; the path itself where it is a single model, or a hub's name."""
    return [str(member) for member in sorted(Path(path).expanduser().glob(f"{MEMBER}*"))] or [path]


def ensemble_score(scores: torch.Tensor, uncertainty_penalty: float) -> torch.Tensor:
    """Mean over members less the penalty times their standard deviation (population): [M, B] -> [B].

    Coste et al. (arXiv 2310.02743, uncertainty-weighted optimization) subtract the variance; the standard deviation has
    the unit of a score, so that the penalty means the same at every scale.
    """
    return scores.mean(0) - uncertainty_penalty * scores.std(0, correction=0)


def score_rows(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Scores of B whole sequences of token ids, [B]; what they have in common at the start is computed once."""
    shared = shared_prefix(rows)
    return score_sequences(model, [row[:shared] for row in rows], [row[shared:] for row in rows])


def score_sequences(model: Any, prompts: Sequence[Sequence[int]], rests: Sequence[Sequence[int]]) -> torch.Tensor:
    """Scalar head at the last token of each sequence prompt + rest (token ids): B sequences -> [B]."""
    device = next(model.parameters()).device
    packed = pack(prompts, rests, device)
    hidden = hidden_states(model.base_model, packed.ids, packed.positions, packed.attention)
    return model.score(hidden[torch.tensor(packed.last, device=device)]).squeeze(-1).float()


class Scorer:
    """The reward breakdown of completions: rules in a pool of killable processes, reward models here.

    Scoring starts when `start` is called and goes on beside the caller's work; `Scores.finish` waits for it.
    General prompts: the helpful model reads the final summary only, the safety model the whole response (R1, stage 4).
    Steps are scored by a rule there, or by a process reward model here.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, Any]],
        scoring: Scoring,
        step_reward: str | None = None,
    ):
        """`rewards`: name of each reward -> its options; `step_reward`: what scores the steps of the reasoning, if
        anything does. The processes start here, reward models are loaded later."""
        self.step_reward = step_reward
        self.step_model: StepScorer | None = None
        rules = [name for name in rewards if name not in MODEL_REWARDS]
        self.rules = {name: (find(name), dict(rewards[name])) for name in rules}
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes of this job, each with a pool of its own
        workers = scoring.workers or max(1, (os.cpu_count() or 1) // beside)
        prepare = functools.partial(load, rules)  # what a worker imports first is on nobody's time
        self.pool = Pool(workers, scoring.time_limit_s, int(scoring.memory_gb * 1e9), prepare)
        self.helpful: RewardModelScorer | None = None
        self.safe: RewardModelScorer | None = None

    def load_models(
        self,
        helpful_model: str | None,
        safe_model: str | None,
        hardware: Hardware,
        uncertainty_penalty: float = 0.0,
    ) -> None:
        """Reward models for general prompts, each from its folder, a model's or an ensemble's."""
        given = [path for path in (helpful_model, safe_model) if path]
        if uncertainty_penalty and given and all(len(member_folders(path)) == 1 for path in given):
            raise InputError(f"uncertainty_penalty needs an ensemble, {given[0]} is one model; set the penalty to 0")
        options: dict[str, Any] = {"hardware": hardware, "uncertainty_penalty": uncertainty_penalty}
        self.helpful = RewardModelScorer(helpful_model, **options) if helpful_model else None
        self.safe = RewardModelScorer(safe_model, **options) if safe_model else None
        if self.step_reward is not None and is_folder(self.step_reward):
            from grpo.training.process_reward_model import StepScorer  # with what trains it: few jobs need it

            self.step_model = StepScorer(self.step_reward, hardware)

    def start(self, problem: Problem, responses: Sequence[Response]) -> Scores:
        """Begin to score the responses to a problem."""
        submit = self.pool.submit
        asked = {n: rule for n, rule in self.rules.items() if problem.domain in rule[0].domains}
        quick = {name: options for name, (reward, options) in asked.items() if reward.quick(problem)}
        slow = [
            {name: submit(score_one, name, asked[name][1], problem, response) for name in asked if name not in quick}
            for response in responses
        ]
        steps = None
        if self.step_reward is not None and not is_folder(self.step_reward):
            steps = [submit(step_rewards, self.step_reward, problem, response.text) for response in responses]
        together = submit(score_many, quick, problem, list(responses)) if quick else None
        return Scores(self, problem, list(responses), [*asked], quick, together, slow, steps)

    def close(self) -> None:
        self.pool.close()


@dataclass
class Failures:
    """Rewards that failed, by kind: what a completion's own program did under its own kind ("code_timeout", ...), a
    verifier that ran too long, died or raised as "timeout", "crash" or "error"."""

    completions: int = 0  # scored in all
    kinds: Counter[str] = field(default_factory=Counter)
    broken: int = 0  # completions that met a failing verifier
    example: str = ""

    def count(self, of_completion: Sequence[Failure]) -> None:
        self.kinds.update(failure.kind for failure in of_completion)
        if of_verifier := [failure for failure in of_completion if not failure.of_answer]:
            self.broken += 1
            self.example = self.example or of_verifier[0].message

    def add(self, more: Failures) -> None:
        self.completions += more.completions
        self.kinds += more.kinds
        self.broken += more.broken
        self.example = self.example or more.example

    def stop_above(self, share: float) -> None:
        """Raises TrainingStopped if more than `share` of the completions met a failing verifier."""
        if self.broken > share * self.completions:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
            raise TrainingStopped(
                f"rewards failed for {self.broken} of {self.completions} completions ({kinds}); the first: "
                f"{self.example}; mend the reward, or raise scoring.time_limit_s, memory_gb or max_failure_share"
            )


@dataclass
class Scored:
    """Scores of the responses to a problem."""

    breakdowns: list[dict[str, float]]  # unweighted
    steps: list[list[tuple[int, float]]] | None  # (character where a step ends, its reward), under process supervision
    failures: Failures


@dataclass
class Scores:
    """Scores in the making, of the responses to a problem."""

    scorer: Scorer
    problem: Problem
    responses: list[Response]
    rules: list[str]
    quick: dict[str, dict[str, Any]]  # name -> options of those that are scored together
    together: Future[Any] | None
    slow: list[dict[str, Future[Any]]]
    steps: list[Future[Any]] | None

    @property
    def ready(self) -> bool:
        """Whether the rules have finished."""
        futures = [future for of_response in self.slow for future in of_response.values()]
        futures += [*(self.steps or []), *([self.together] if self.together else [])]
        return all(future.done() for future in futures)

    def finish(self) -> Scored:
        """Waits for the rules and asks the reward models.

        A reward that fails is 0, since an answer that breaks its verifier is not a right one, and it is counted. Where
        the reward of the steps fails there are none.
        """
        quick = self._quick()
        slow = [{name: future.result() for name, future in of_response.items()} for of_response in self.slow]
        results = [{name: (q | s)[name] for name in self.rules} for q, s in zip(quick, slow, strict=True)]
        steps = None if self.steps is None else [future.result() for future in self.steps]
        failures = Failures(completions=len(results))
        for i, of_response in enumerate(results):
            values = [*of_response.values(), *(() if steps is None else (steps[i],))]
            failures.count([value for value in values if isinstance(value, Failure)])
        breakdowns = [{n: 0.0 if isinstance(v, Failure) else v for n, v in found.items()} for found in results]
        if self.problem.domain == "general":
            self._ask_models(breakdowns)
        known = None if steps is None else [[] if isinstance(found, Failure) else found for found in steps]
        if self.scorer.step_model is not None:
            known = self.scorer.step_model(self.problem.messages, [response.text for response in self.responses])
        return Scored(breakdowns, known, failures)

    def _quick(self) -> list[dict[str, Any]]:
        if self.together is None:
            return [{} for _ in self.responses]
        found = self.together.result()
        if isinstance(found, Failure):  # which of them it was shows when each is scored by itself
            submit, problem = self.scorer.pool.submit, self.problem
            single = [{n: submit(score_one, n, o, problem, r) for n, o in self.quick.items()} for r in self.responses]
            found = [{name: future.result() for name, future in of_response.items()} for of_response in single]
        return found

    def _ask_models(self, breakdowns: list[dict[str, float]]) -> None:
        messages = [self.problem.messages] * len(breakdowns)
        if self.scorer.helpful:
            scores = self.scorer.helpful(messages, [response.parts.summary for response in self.responses])
            for breakdown, score in zip(breakdowns, scores, strict=True):
                breakdown["helpful"] = score
        if self.scorer.safe:
            scores = self.scorer.safe(messages, [response.text for response in self.responses])
            for breakdown, score in zip(breakdowns, scores, strict=True):
                # The head gives a logit; the probability of "safe" is bounded, as a reward should be.
                breakdown["safe"] = torch.tensor(score).sigmoid().item()
