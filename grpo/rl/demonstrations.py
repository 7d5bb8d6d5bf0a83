"""Fixed data instead of sampled completions: demonstrations for SFT, preference pairs for DPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.config.jobs import RLJob
from grpo.data.conversations import demonstrations, read_rows_of
from grpo.data.permutation import permutation
from grpo.data.template import completion_tokens, opened_reasoning, prompt_tokens
from grpo.errors import InputError
from grpo.rl.batch import Rollout
from grpo.rl.model_set import Models
from grpo.rl.per_token_values import measure

Pair = tuple[list[int], list[list[int]]]
"""A prompt, and the chosen and the rejected completion, as token ids."""


class Demonstrations:
    """Yields as many demonstrations per step as other methods sample completions; reshuffled each epoch."""

    def __init__(self, job: RLJob, tokenizer: Any):
        if job.demonstrations is None:
            raise InputError("method 'sft' learns from demonstrations; the job names none")
        self.job = job
        self.rows = [self._tokens(tokenizer, row) for row in demonstrations(job.demonstrations)]
        if not self.rows:
            raise InputError(f"{job.demonstrations}: no demonstrations")

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        a_step = self.job.settings.prompts_per_step * self.job.settings.group_size
        chosen = [self._at(position) for position in range(step * a_step, (step + minibatches) * a_step)]
        lengths = [len(completion) for _, completion in chosen]
        return Rollout(
            prompts=[prompt for prompt, _ in chosen],
            completions=[completion for _, completion in chosen],
            advantages=[torch.ones(length) for length in lengths],
            old_logprobs=[torch.zeros(length) for length in lengths],
            ref_logprobs=None,
            old_values=None,
            returns=None,
            learnt=[True] * len(chosen),
            units=[[i] for i in range(len(chosen))],
            metrics={"completion_tokens": sum(lengths) / len(lengths)},
        )

    def state(self) -> dict[str, Any]:
        return {}  # the step determines the next demonstrations

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

    def _tokens(self, tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
        prompt = prompt_tokens(tokenizer, row["messages"], self.job.template, self.job.zero_template)
        completion = completion_tokens(tokenizer, row["completion"], opened_reasoning(tokenizer, prompt))
        return prompt, completion[: self.job.settings.sampling.max_new_tokens]

    def _at(self, position: int) -> tuple[list[int], list[int]]:
        epoch, index = divmod(position, len(self.rows))
        return self.rows[permutation(len(self.rows), f"{self.job.seed}/{epoch}")[index]]


class GivenPairs(Demonstrations):
    """Yields half as many pairs per step as other methods sample completions, reshuffled each epoch, with the
    reference's log-probabilities: DPO as published (arXiv 2305.18290)."""

    def __init__(self, job: RLJob, tokenizer: Any, models: Models):
        if job.pairs is None:
            raise InputError("method 'dpo' with files learns from pairs; the job names none")
        self.job, self.models = job, models
        self.pairs: list[Pair] = []
        for row in read_rows_of(job.pairs, ("messages", "chosen", "rejected")):
            sides = [self._tokens(tokenizer, {**row, "completion": row[side]}) for side in ("chosen", "rejected")]
            self.pairs.append((sides[0][0], [completion for _, completion in sides]))
        if not self.pairs:
            raise InputError(f"{job.pairs}: no pairs")

    def __call__(self, step: int, minibatches: int, attempt: int) -> Rollout:
        settings = self.job.settings
        a_step = max(1, settings.prompts_per_step * settings.group_size // 2)
        chosen = [self._pair(position) for position in range(step * a_step, (step + minibatches) * a_step)]
        prompts, completions = _sequences(chosen)
        lengths = [len(completion) for completion in completions]
        return Rollout(
            prompts=prompts,
            completions=completions,
            advantages=[torch.zeros(length) for length in lengths],
            old_logprobs=[torch.zeros(length) for length in lengths],
            ref_logprobs=self._measured(chosen),
            old_values=None,
            returns=None,
            learnt=[True] * len(completions),
            units=[[2 * i, 2 * i + 1] for i in range(len(chosen))],
            metrics={"completion_tokens": sum(lengths) / len(lengths)},
        )

    def _pair(self, position: int) -> Pair:
        epoch, index = divmod(position, len(self.pairs))
        return self.pairs[permutation(len(self.pairs), f"{self.job.seed}/{epoch}")[index]]

    def _measured(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """The reference's log-probabilities of each completion. Each process measures its share of the pairs: both
        sides of one together, which share the computation of the prompt."""
        parallel, room = self.models.parallel, self.job.settings.micro_batch_tokens
        with self.models.reference_logprobs(1.0) as of_reference:
            own = measure(of_reference, *_sequences(parallel.deal(pairs)), room, parallel)
        of_pairs = parallel.collect([*zip(own[::2], own[1::2], strict=True)])
        return [side for sides in of_pairs for side in sides]


def _sequences(pairs: Sequence[Pair]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and completions of both sides of each pair."""
    prompts = [prompt for prompt, sides in pairs for _ in sides]
    return prompts, [side for _, sides in pairs for side in sides]
