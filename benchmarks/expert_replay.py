"""Sampler against trainer for mixtures of experts: |log p - log p| and the share of tokens with another expert.

    python -m benchmarks.expert_replay [TYPE ...] [--dtype bfloat16] [--hidden 256] [--seeds 0 1 2]

Models have random weights, four layers and 16 experts, of which a token gets 4. Each samples 2 x 8 completions of 96
tokens, packed; the trainer then computes the same tokens with its own choice of experts, and with the sampler's
(`experts.replay = true`). One line a type and seed, in nats a token; `other expert`: share of tokens for which, in some
layer, one of the experts is another.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from torch import Tensor

from benchmarks.tiny_models import PROMPTS, build
from grpo.config.common import Hardware, Sampling
from grpo.config.experts import Experts
from grpo.generation.sampler import sample
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.routers import experts_in_pack, prepare_routers, recorded, replayed

TYPES = ("qwen3_moe", "deepseek_v3", "mixtral")
PER_PROMPT, LENGTH, EXPERTS, CHOSEN = 8, 96, 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for kind in args.types:
        with tempfile.TemporaryDirectory() as folder:
            build(kind, Path(folder), **sizes(args.hidden))
            policy = load_policy(folder, Hardware(device="cpu", dtype=args.dtype))
        routers = prepare_routers(policy, kind, Experts(replay=True))
        for seed in args.seeds:
            print(f"{kind} seed {seed}: {measured(policy, routers, seed)}", flush=True)


def sizes(hidden: int) -> dict[str, int]:
    """Of the configuration of a model with more experts than the tiny ones."""
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    wide = dict(hidden_size=hidden, intermediate_size=2 * hidden, moe_intermediate_size=hidden)
    return {**counts, **wide, "num_experts_per_tok": CHOSEN}


@torch.no_grad()
def measured(policy: torch.nn.Module, routers: list[torch.nn.Module], seed: int) -> str:
    """What differs between a sampler and a trainer, in words."""
    seeds = [2 * seed, 2 * seed + 1]
    groups = sample(policy, PROMPTS, PER_PROMPT, Sampling(max_new_tokens=LENGTH), eos_id=2, seeds=seeds)
    prompts = [prompt for prompt in PROMPTS for _ in range(PER_PROMPT)]
    completions = [completion for group in groups for completion in group]
    tokens = [completion.tokens for completion in completions]
    sampler = torch.cat([torch.tensor(completion.logprobs) for completion in completions])
    with recorded(routers) as calls:
        own = _flat(completion_logprobs(policy, prompts, tokens, 1.0), tokens)
    chosen = experts_in_pack(prompts, tokens, [completion.experts for completion in completions], policy.device)
    with replayed(routers, chosen):
        same = _flat(completion_logprobs(policy, prompts, tokens, 1.0), tokens)
    others = [call[0].experts.sort(1).values != of.sort(1).values for call, of in zip(calls, chosen, strict=True)]
    share = torch.stack([differ.any(1) for differ in others]).any(0).float().mean().item()
    return (
        f"{len(own)} tokens, other expert {share:.1%}; |sampler - trainer| mean {(own - sampler).abs().mean():.4f}, "
        f"largest {(own - sampler).abs().max():.3f}; replayed mean {(same - sampler).abs().mean():.4f}, "
        f"largest {(same - sampler).abs().max():.3f}"
    )


def _flat(table: Tensor, rows: list[list[int]]) -> Tensor:
    return torch.cat([line[: len(row)].float() for line, row in zip(table, rows, strict=True)])


if __name__ == "__main__":
    main()
