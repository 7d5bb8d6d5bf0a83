"""TRL's loss and all gradients of a GRPO step against ours, on the same rollouts.

    python benchmarks/grpo_agreement.py CASE.json

Run by benchmarks/grpo_vs_trl.py; the last line is a JSON object. The rollouts are sampled once by
transformers.generate. Old and reference log-probabilities are the model's own, moved by fixed noise, so that ratios
leave 1, clips take effect and the penalty is not 0.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from extras import need
from grpo_case import Case
from grpo_step import rl_settings
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl_step import make_trl_trainer

from grpo.config.rl import RL
from grpo.data.template import prompt_tokens
from grpo.distributed.process_group import Parallel
from grpo.model.loading import load_tokenizer
from grpo.rl.batch import Rollout
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models
from grpo.rl.update import Update

NOISE = 0.15
"""Standard deviation of old and reference log-probabilities around the model's: about 1 in 5 ratios leaves 0.8..1.2."""

Gradients = dict[str, Tensor]


@dataclass
class Rollouts:
    """The inputs of both losses, by row: token ids, and a number per completion (advantages) or token (the others)."""

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[float]
    old_logprobs: list[Tensor]
    ref_logprobs: list[Tensor]


@torch.inference_mode()
def make_rollouts(case: Case) -> Rollouts:
    tokenizer = load_tokenizer(case.model)
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32).eval()
    prompts = [prompt_tokens(tokenizer, m, "chat") for m in case.prompts for _ in range(case.group_size)]
    torch.manual_seed(case.seed)
    sampled = model.generate(
        **left_padded(prompts, tokenizer.pad_token_id),
        do_sample=True,
        max_new_tokens=case.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        top_k=0,
    )[:, max(map(len, prompts)) :].tolist()
    completions = [
        row[: row.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in row else row for row in sampled
    ]
    own = [logprobs_of(model, p, c) for p, c in zip(prompts, completions, strict=True)]
    old, reference = ([x + NOISE * torch.randn(len(x)) for x in own] for _ in range(2))
    return Rollouts(prompts, completions, torch.randn(len(prompts)).tolist(), old, reference)


def logprobs_of(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


def left_padded(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    reverse = [torch.tensor(row[::-1]) for row in rows]
    return {
        "input_ids": pad_sequence(reverse, batch_first=True, padding_value=pad).flip(1),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in reverse], batch_first=True).flip(1),
    }


def right_padded(rows: list[Tensor], pad: float = 0) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=pad)


def of_trl(case: Case, rollouts: Rollouts) -> tuple[float, Gradients]:
    """TRL's loss through its own forward pass, micro-batch by micro-batch as its training loop goes."""
    from trl import GRPOTrainer

    trainer = make_trl_trainer(case, GRPOTrainer)
    parts = torch.arange(case.rows).split(case.trl_rows)
    trainer.current_gradient_accumulation_steps = len(parts)  # the training loop sets it before each step
    trainer.model.train()
    total = 0.0
    for part in (rows.tolist() for rows in parts):
        prompts = left_padded([rollouts.prompts[i] for i in part], 0)
        completions = [torch.tensor(rollouts.completions[i]) for i in part]
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": prompts["input_ids"],
                "prompt_mask": prompts["attention_mask"],
                "completion_ids": right_padded(completions),
                "completion_mask": right_padded([torch.ones_like(c) for c in completions]),
                "advantages": torch.tensor([rollouts.advantages[i] for i in part]),
                "old_per_token_logps": right_padded([rollouts.old_logprobs[i] for i in part]),
                "ref_per_token_logps": right_padded([rollouts.ref_logprobs[i] for i in part]),
                "num_items_in_batch": torch.tensor(sum(map(len, rollouts.completions))),
            },
        )
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in trainer.model.named_parameters()}


def of_ours(case: Case, rollouts: Rollouts) -> tuple[float, Gradients]:
    """Our update, whole, as the trainer calls it; the gradients are those that the optimizer is given."""
    # A clip of the norm that never binds, so that gradients arrive as they are.
    settings = rl_settings(case)
    settings["optimizer"] |= {"max_grad_norm": 1e30}
    checked = RL.model_validate(settings)
    alone = Parallel.start(checked.hardware)
    models = Models(case.model, checked, METHODS["grpo"], alone)
    update = Update(checked, METHODS["grpo"], models, alone)
    gradients: Gradients = {}
    update.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: p.grad.clone() for name, p in models.policy.model.named_parameters()})
    )
    rollout = Rollout(
        prompts=rollouts.prompts,
        completions=rollouts.completions,
        advantages=[torch.full((len(c),), a) for c, a in zip(rollouts.completions, rollouts.advantages, strict=True)],
        old_logprobs=rollouts.old_logprobs,
        ref_logprobs=rollouts.ref_logprobs,
        old_values=None,
        returns=None,
        learnt=[True] * case.rows,
        units=[[i] for i in range(case.rows)],
        metrics={},
    )
    stats = update(rollout, range(case.rows), 0)
    return stats["loss"], gradients


def agreement(case: Case) -> dict[str, Any]:
    """Largest absolute differences, and beside them how large the gradients are."""
    rollouts = make_rollouts(case)
    (their_loss, theirs), (our_loss, ours) = of_trl(case, rollouts), of_ours(case, rollouts)
    if theirs.keys() != ours.keys():
        raise RuntimeError(f"not the same parameters: {sorted(theirs.keys() ^ ours.keys())}")
    differences = {name: (theirs[name] - ours[name]).abs().max().item() for name in theirs}
    worst = max(differences, key=lambda name: differences[name])
    return {
        "loss": their_loss,
        "loss_difference": abs(their_loss - our_loss),
        "gradient_difference": differences[worst],
        "gradient_largest": max(g.abs().max().item() for g in theirs.values()),
        "gradient_differs_most": worst,
        "parameters": sum(g.numel() for g in theirs.values()),
        "completion_tokens": sum(map(len, rollouts.completions)),
    }


if __name__ == "__main__":
    need("trl")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(json.dumps(agreement(Case(**json.loads(Path(sys.argv[1]).read_text())))))
