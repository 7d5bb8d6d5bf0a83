"""Lets verl sample on a CPU, with transformers' `generate` in the place of vLLM. Loaded after `verl_on_cpu`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "transformers"
RECORD = "VERL_SAMPLED"
"""Variable with a file to which each completion is appended: prompt, tokens, log-probabilities."""


class Server:
    """A copy of the policy that samples one completion at a time."""

    def __init__(self, model: str):
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.step = 0

    async def set_weights(self, weights: dict[str, torch.Tensor], step: int) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.step = step

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        assert sampling_params["ignore_eos"]  # vLLM would also end where the model's folder says
        with torch.no_grad():
            made = self.model.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
                do_sample=True,
                temperature=sampling_params["temperature"],
                top_p=sampling_params["top_p"],
                top_k=0,
                max_new_tokens=sampling_params["max_tokens"],
                eos_token_id=sampling_params["stop_token_ids"],
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = made.sequences[0, len(prompt_ids) :].tolist()
        logprobs = (torch.cat(made.logits) / sampling_params["temperature"]).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        if path := os.environ.get(RECORD):
            with Path(path).open("a") as file:
                file.write(json.dumps({"prompt": prompt_ids, "tokens": tokens, "logprobs": chosen}) + "\n")
        return TokenOutput(
            token_ids=tokens, log_probs=chosen, stop_reason="completed", extra_fields={"global_steps": self.step}
        )

    async def set_global_steps(self, step: int) -> None:
        self.step = step

    async def sleep(self) -> None:
        pass

    async def wake_up(self, tags: Any = None) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    release_kv_cache = resume_kv_cache = clear_kv_cache


class Replica(RolloutReplica):
    """One server for each process of the trainer."""

    def rollout_worker_use_gpu(self) -> bool:
        return False

    async def launch_servers(self) -> None:
        server = ray.remote(num_cpus=0)(Server).options(name=_name(self.replica_rank)).remote(self.model_config.path)
        await server.sleep.remote()
        self.servers, self._server_handle, self._server_address = [server], server, _name(self.replica_rank)


class Weights(base.BaseRollout):
    """In the trainer's process: hands the weights to its server."""

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int = 0, **_: Any
    ) -> None:
        whole = {name: weight.detach().float().cpu().clone() for name, weight in weights}
        await ray.get_actor(_name(torch.distributed.get_rank())).set_weights.remote(whole, global_steps)


def _name(rank: int) -> str:
    return f"server-{rank}"


base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.{Weights.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
torch.Tensor.pin_memory = lambda self, *_, **__: self
