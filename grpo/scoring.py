"""Scores of reward models, and the full reward breakdown of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo.config import Hardware
from grpo.data import Message, Problem
from grpo.policy import load_reward_model, load_tokenizer, pad
from grpo.rewards import rule_rewards
from grpo.template import Parts


def conversation_tokens(tokenizer: Any, messages: list[Message], response: str) -> list[int]:
    """Token ids of a prompt and the response to it: what a reward model reads, in training and in scoring."""
    turns = [*messages, {"role": "assistant", "content": response}]
    return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)


class RewardModelScorer:
    """A trained reward model."""

    def __init__(self, path: str, hardware: Hardware, batch_size: int = 64):
        self.tokenizer = load_tokenizer(path)
        self.model = load_reward_model(path, hardware)
        self.batch_size = batch_size

    @torch.inference_mode()
    def __call__(self, messages: Sequence[list[Message]], responses: Sequence[str]) -> list[float]:
        """One score a response, unbounded, higher is better."""
        rows = [conversation_tokens(self.tokenizer, m, r) for m, r in zip(messages, responses, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            scores += score_rows(self.model, rows[start : start + self.batch_size]).tolist()
        return scores


def score_rows(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Scalar head at each row's last token: token ids, B rows -> [B]."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = pad(rows, 0).to(device)
    mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return model.score(hidden[torch.arange(len(rows), device=device), lengths - 1]).squeeze(-1).float()


class Scorer:
    """Scores completions with the branch of their problem's domain.

    General prompts: the helpful model reads the final summary only, the safety model the whole response (R1, stage 4).
    """

    def __init__(self, helpful_model: str | None, safe_model: str | None, hardware: Hardware):
        self.helpful = RewardModelScorer(helpful_model, hardware) if helpful_model else None
        self.safe = RewardModelScorer(safe_model, hardware) if safe_model else None

    def __call__(
        self, problems: Sequence[Problem], parts: Sequence[Parts], texts: Sequence[str]
    ) -> list[dict[str, float]]:
        """Unweighted reward breakdown of each completion; `texts` are the whole completions."""
        breakdowns = [rule_rewards(problem, part) for problem, part in zip(problems, parts, strict=True)]
        general = [i for i, problem in enumerate(problems) if problem.domain == "general"]
        messages = [problems[i].messages for i in general]
        if self.helpful and general:
            for i, score in zip(general, self.helpful(messages, [parts[i].summary for i in general]), strict=True):
                breakdowns[i]["helpful"] = score
        if self.safe and general:
            for i, score in zip(general, self.safe(messages, [texts[i] for i in general]), strict=True):
                # The head gives a logit; the probability of "safe" is bounded, as a reward should be.
                breakdowns[i]["safe"] = torch.tensor(score).sigmoid().item()
        return breakdowns
