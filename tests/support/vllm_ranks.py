"""One rank of a trainer whose weights are spread over its ranks, beside a vLLM server: run by torchrun.

vllm_ranks.py MODEL URL FOLDER writes FOLDER/<rank>.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.errors import TrainingStopped
from grpo.generation.sampler import seed_of
from grpo.generation.vllm.client import ServerVLLM
from grpo.model.loading import load_tokenizer
from tests.support.vllm_probe import largest_difference, perturb


def gathered(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each rank has half of every tensor, and all must take part for any to see it whole."""
    for name, tensor in weights:
        half = torch.where(
            torch.arange(tensor.numel()).reshape(tensor.shape) % 2 == dist.get_rank(), tensor.detach(), 0
        )
        dist.all_reduce(half)
        yield name, half


def main(model: str, url: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    perturb(policy)
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer(f"compute {i} + {rank}")["input_ids"] for i in range(3)]
    engine = ServerVLLM(model, VLLM(kind="server", url=url, timeout_s=60), eos_id=tokenizer.eos_token_id)
    engine.update(gathered(policy.named_parameters()), 1)
    seeds = [seed_of(rank, number) for number in range(len(prompts))]
    groups = dict(engine.sample(prompts, 4, Sampling(max_new_tokens=32), seeds))
    seen = {"version": engine.version(), "difference": largest_difference(policy, prompts, groups, 1.0)}
    try:
        engine.update(gathered(list(policy.named_parameters())[:3]), 2)
    except TrainingStopped as stopped:
        seen["part"] = str(stopped)
    (Path(folder) / str(rank)).write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
