"""Uses vLLM in its own process, in an environment that has it, and writes what it saw as JSON.

python tests/support/vllm_probe.py MODEL OUT [--tensor-parallel-size N] [--time]; OUT gets the rank appended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.errors import InputError, TrainingStopped
from grpo.generation.sampler import seed_of
from grpo.generation.vllm.local import LocalVLLM


def forward_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of the completion's tokens by transformers, one sequence at a time: no padding, no cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(completion)[:, None]
    return torch.log_softmax(logits / temperature, -1).gather(1, chosen).squeeze(1)


def largest_difference(model: Any, prompts: list[list[int]], groups: dict[int, Any], temperature: float) -> float:
    return max(
        (forward_logprobs(model, prompts[i], c.tokens, temperature) - torch.tensor(c.logprobs)).abs().max().item()
        for i, group in groups.items()
        for c in group
    )


def perturb(model: Any) -> None:
    """Every weight moves, by a twentieth of its matrix's spread: embeddings and norms too."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * max(float(parameter.std()), 0.1) / 20


def random_states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--time", action="store_true")
    given = parser.parse_args()
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    seen: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    # Other prompts on other ranks, and more of them.
    prompts = [tokenizer(f"compute {i} + {i + rank}")["input_ids"] for i in range(3 + rank)]
    prompts.append((prompts[0] * 99)[:300])  # what vLLM keeps of a prompt for the next that begins like it: 128 tokens
    torch.manual_seed(1)
    states, environment, threads = random_states(), dict(os.environ), torch.get_num_threads()
    settings = VLLM(
        kind="local",
        kv_cache_gb=1,
        max_model_len=512,
        enforce_eager=True,
        tensor_parallel_size=given.tensor_parallel_size,
    )
    engine = LocalVLLM(given.model, settings, eos_id=tokenizer.eos_token_id)

    def seeds(seed: int) -> list[int]:
        return [seed_of(seed, rank, number) for number in range(len(prompts))]

    def sample(seed: int = 5, temperature: float = 1.0, tokens: int = 48) -> dict[int, Any]:
        return dict(engine.sample(prompts, 4, Sampling(temperature=temperature, max_new_tokens=tokens), seeds(seed)))

    def difference(temperature: float = 1.0) -> float:
        return largest_difference(model, prompts, sample(temperature=temperature), temperature)

    seen["first_version"] = engine.version()
    groups = sample()
    seen["prompts"], seen["sizes"] = sorted(groups), sorted({len(group) for group in groups.values()})
    completions = [c for group in groups.values() for c in group]
    seen["lengths"] = [len(c.tokens) for c in completions]
    nucleus = Sampling(top_p=0.5, max_new_tokens=48)
    cut = dict(engine.sample(prompts, 4, nucleus, seeds(5), logprobs=False))
    seen["nucleus_sizes"] = sorted({len(group) for group in cut.values()})
    seen["nucleus_logprobs"] = [c.logprobs for group in cut.values() for c in group if c.logprobs]
    seen["nucleus_differs"] = cut != groups
    try:
        next(engine.sample(prompts, 4, nucleus, seeds(5)))
    except InputError as error:
        seen["nucleus_refused"] = str(error)
    seen["finished"] = [c.finished for c in completions]
    seen["ends"] = [c.tokens[-1] == tokenizer.eos_token_id for c in completions]
    seen["again"] = sample() == groups
    often = Counter(token for c in completions for token in {*c.tokens}).most_common(1)[0][0]
    if "RANK" in os.environ:  # ranks that share a model end all completions alike
        shared = torch.tensor(often)
        dist.broadcast(shared, 0)
        often = int(shared)
    engine._eos_id = frozenset({often, tokenizer.eos_token_id})
    several = [c for group in dict(sorted(sample().items())).values() for c in group]
    cuts = [[*c.tokens, often].index(often) + 1 for _, group in sorted(groups.items()) for c in group]
    uncut = [c.tokens for _, group in sorted(groups.items()) for c in group]
    seen["several_ends"] = [c.tokens for c in several] == [t[:cut] for t, cut in zip(uncut, cuts, strict=True)]
    seen["several_finished"] = [c.finished for c in several] == [c.tokens[-1] in engine._eos_id for c in several]
    engine._eos_id = tokenizer.eos_token_id
    seen["other_seed_differs"] = sample(seed=100) != groups
    seen["distinct"] = len({tuple(c.tokens) for c in completions}) / len(completions)
    seen["difference"] = {str(t): difference(t) for t in (1.0, 0.7)}
    perturb(model)
    seen["stale"] = difference()
    began = time.perf_counter()
    engine.update(model.state_dict().items(), 7)
    seen["update_s"] = time.perf_counter() - began
    seen["version"], seen["updated"] = engine.version(), {str(t): difference(t) for t in (1.0, 0.7)}
    try:
        engine.update(list(model.named_parameters())[:3], 8)
    except TrainingStopped as stopped:
        seen["part"] = str(stopped)
    seen["version_after_part"] = engine.version()
    engine.update(model.named_parameters(), 9)
    seen["repaired"] = difference()
    engine.sleep()
    engine.wake()
    seen["after_sleep"] = difference()
    started = engine.sample(prompts, 4, Sampling(max_new_tokens=48), seeds(1))
    if "RANK" not in os.environ:  # ranks that share a model must finish together
        next(started)
        started.close()
        seen["given_up"] = sample() == sample()
    seen["random_numbers_kept"] = random_states() == states
    seen["threads_kept"] = torch.get_num_threads() == threads
    seen["leaked"] = [n for n in ("LD_PRELOAD", "LOCAL_WORLD_SIZE") if os.environ.get(n) != environment.get(n)]
    if given.time:
        seen |= timed(engine)
    engine.close()
    if "RANK" in os.environ:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        seen["group_after_close"] = ones.item()
        dist.destroy_process_group()
    Path(f"{given.out}{rank}").write_text(json.dumps(seen))


def timed(engine: LocalVLLM) -> dict[str, float]:
    prompt = torch.randint(100, 40_000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    began = time.perf_counter()
    ((_, group),) = engine.sample([prompt], 16, Sampling(max_new_tokens=128), [1])
    return {"tokens_per_s": sum(len(c.tokens) for c in group) / (time.perf_counter() - began)}


if __name__ == "__main__":
    main()
