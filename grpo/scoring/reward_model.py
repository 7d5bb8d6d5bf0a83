"""Scores whole responses with a trained reward model or an ensemble of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo.config.common import Hardware
from grpo.config.jobs import MEMBER
from grpo.data.records import Message
from grpo.data.template import completion_tokens, opened_reasoning, prompt_tokens
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import REWARD_MODEL, choose_device, load_tokenizer
from grpo.model.logprobs import token_states
from grpo.model.packed.packing import PASS_TOKENS, shared_prefix
from grpo.model.sharded.loading import load_sharded
from grpo.model_folder import check_vocabulary

FILLER = [[0, 0]]
"""Token ids of a conversation, for a process that has none."""


def conversation_tokens(tokenizer: Any, messages: list[Message], response: str) -> list[int]:
    """Token ids of a prompt and its response: the input of a reward model in training and in scoring.

    By the chat template, if that writes the whole response. Some, such as those of DeepSeek-R1's distillates, leave the
    reasoning out: then the response follows the prompt as in SFT.
    """
    turns = [*messages, {"role": "assistant", "content": response}]
    # Without white space, because many templates trim texts. Counted, because the prompt may quote the response.
    texts = (tokenizer.apply_chat_template(part, tokenize=False) for part in (messages, turns))
    before, written = map(_without_spaces, texts)
    if written.count(_without_spaces(response)) > before.count(_without_spaces(response)):
        return tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    prompt = prompt_tokens(tokenizer, messages, "chat")
    return prompt + completion_tokens(tokenizer, response, opened_reasoning(tokenizer, prompt))


def up_to_scored(ids: Sequence[int], pad_id: int | None) -> Sequence[int]:
    """The token ids up to the one at which the sequence is scored: the last that is no padding, as in transformers'
    classifiers. So other programs get the same scores. It is not the last of all if the token that ends a response also
    serves as padding. None: the model knows no padding."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


class RewardModelScorer:
    """One trained reward model, or an ensemble of several."""

    def __init__(
        self,
        path: str,
        hardware: Hardware,
        batch_size: int = 64,
        uncertainty_penalty: float = 0.0,
        parallel: Parallel | None = None,
    ):
        """Loads a model from the folder `path`, or an ensemble from its subfolders, one per member, sharded over the
        processes of `parallel`. None: this process has them whole."""
        self.parallel = parallel or Parallel.alone(choose_device(hardware))
        members = member_folders(path)
        self.tokenizer = load_tokenizer(members[0])
        options: dict[str, Any] = {"kind": REWARD_MODEL, "trained": False}
        self.members = [load_sharded(member, hardware, self.parallel, **options) for member in members]
        models = [member.model for member in self.members]
        if not all(hasattr(model, "score") for model in models) or self.tokenizer.chat_template is None:
            raise InputError(
                f"{path}: cannot score conversations; a reward model is a decoder with a head `score` of one output, "
                "and its tokenizer has a chat template"
            )
        for member, model in zip(members, models, strict=True):
            check_vocabulary(model, self.tokenizer, member)
        self.batch_size, self.uncertainty_penalty = batch_size, uncertainty_penalty

    @torch.inference_mode()
    def __call__(self, messages: Sequence[list[Message]], responses: Sequence[str]) -> list[float]:
        """One score per response, unbounded; higher is better. All processes must call it together, each with its
        responses; neighbours to the same messages share the computation of the prompt."""
        batches: list[list[list[int]]] = []
        for asked, together in itertools.groupby(zip(messages, responses, strict=True), key=lambda pair: pair[0]):
            rows = [conversation_tokens(self.tokenizer, asked, response) for _, response in together]
            batches += _batches(rows, self.batch_size)
        return [score for scores in self.parallel.map_together(self._score, batches, FILLER) for score in scores]

    def _score(self, rows: list[list[int]]) -> list[float]:
        member_scores = torch.stack([member(score_rows, rows) for member in self.members])
        scores: list[float] = ensemble_score(member_scores, self.uncertainty_penalty).tolist()
        return scores


def _batches(rows: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    """The rows in batches of at most `size` of them, and at most PASS_TOKENS tokens (at least one row each)."""
    batch: list[list[int]] = []
    tokens = 0
    for row in rows:
        if batch and (len(batch) == size or tokens + len(row) > PASS_TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row)
    if batch:
        yield batch


def member_folders(path: str) -> list[str]:
    """Subfolders of an ensemble's members, sorted; `[path]` for a single model or a hub name."""
    return [str(member) for member in sorted(Path(path).expanduser().glob(f"{MEMBER}*"))] or [path]


def ensemble_score(scores: torch.Tensor, uncertainty_penalty: float) -> torch.Tensor:
    """Mean over members minus the penalty times their population standard deviation: [M, B] -> [B].

    Coste et al. (arXiv 2310.02743, uncertainty-weighted optimization) subtract the variance; the standard deviation has
    the same unit as a score, which makes the penalty independent of the scale.
    """
    return scores.mean(0) - uncertainty_penalty * scores.std(0, correction=0)


def score_rows(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Scores [B] of B complete sequences of token ids. Their common prefix is computed once."""
    pad_id = model.config.get_text_config().pad_token_id
    rows = [up_to_scored(row, pad_id) for row in rows]
    shared = shared_prefix(rows)
    return score_sequences(model, [row[:shared] for row in rows], [row[shared:] for row in rows])


def score_sequences(model: Any, prompts: Sequence[Sequence[int]], rests: Sequence[Sequence[int]]) -> torch.Tensor:
    """Output of the scalar head at the last token of each of B sequences prompt + rest (token ids), [B]."""
    last = torch.tensor([len(prompt) + len(rest) - 1 for prompt, rest in zip(prompts, rests, strict=True)])
    states = token_states(model.base_model, prompts, rests, torch.arange(len(last)), last)
    return model.score(states).squeeze(-1).float()
