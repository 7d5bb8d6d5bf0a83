"""Demonstrations instead of sampled completions: the data of SFT in the unified view."""

from __future__ import annotations

from typing import Any

import torch

from grpo.config.jobs import RLJob
from grpo.data.conversations import demonstrations
from grpo.data.permutation import permutation
from grpo.data.template import completion_tokens, opened_reasoning, prompt_tokens
from grpo.errors import InputError
from grpo.rl.batch import Rollout


class Demonstrations:
    """Yields as many demonstrations a step as other methods sample completions, shuffled anew in each epoch."""

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
