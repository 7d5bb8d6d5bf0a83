"""Updates of a mixture of experts in vLLM, in an environment that has it: vllm_experts.py MODEL OUT writes JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import AutoModelForCausalLM

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.distributed.fsdp import shard
from grpo.distributed.process_group import Parallel
from grpo.generation.vllm.local import LocalVLLM
from grpo.model.loading import load_tokenizer
from tests.support.vllm_probe import largest_difference, perturb


def main(model: str, out: str) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer(f"compute {i} + {i}")["input_ids"] for i in range(3)]
    settings = VLLM(kind="local", kv_cache_gb=0.25, max_model_len=256, enforce_eager=True)
    engine = LocalVLLM(model, settings, eos_id=tokenizer.eos_token_id)
    sharded = shard(policy, Parallel.alone(torch.device("cpu")))
    seen = {}

    def sample(name: str) -> list[list[float]]:
        groups = dict(engine.sample(prompts, 4, Sampling(max_new_tokens=24), [1, 2, 3]))
        seen[name] = largest_difference(policy, prompts, groups, 1.0)
        return [c.logprobs for number in sorted(groups) for c in groups[number]]

    read = sample("read")
    engine.update(sharded.file_tensors(), 1)
    seen["as_read"] = sample("sent") == read
    perturb(policy)
    sample("stale")
    engine.update(sharded.file_tensors(), 2)
    moved = sample("updated")
    engine.update(sharded.file_tensors(), 3)
    seen["moves"], seen["again"] = moved != read, sample("updated again") == moved
    engine.close()
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
