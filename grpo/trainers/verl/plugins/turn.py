"""A completion and its reward, as verl's agent loop."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import aiohttp
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from grpo.trainers.verl.protocol import REWARD, TOKEN_HEADER, Sampled, ServerAddress

_WAIT = aiohttp.ClientTimeout(total=None, sock_connect=60)
"""A reward may take long: the server, not the client, decides when one has failed."""


class Turn(AgentLoopBase):
    """Samples a completion of the prompt's own tokens, and asks this library's server for its reward."""

    def __init__(self, *arguments: Any, server: str, **others: Any):
        super().__init__(*arguments, **others)
        self._server: ServerAddress = json.loads(Path(server).read_text())

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = [*map(int, row["raw_prompt"].split())]
        longest = self.rollout_config.response_length
        sampled = await self.server_manager.generate(
            request_id=uuid.uuid4().hex,
            prompt_ids=prompt,
            # Completions end with the tokenizer's end token alone, even if the model's folder names others.
            sampling_params={
                **sampling_params,
                "max_tokens": longest,
                "ignore_eos": True,
                "stop_token_ids": [self._server["end"]],
            },
        )
        if not sampled.token_ids:
            raise RuntimeError(f"no completion was sampled for row {row['index']}: {sampled.stop_reason}")
        completion = Sampled(
            row=int(row["index"]), tokens=sampled.token_ids[:longest], logprobs=(sampled.log_probs or [])[:longest]
        )
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=completion["tokens"],
            response_mask=[1] * len(completion["tokens"]),
            response_logprobs=completion["logprobs"] or None,
            reward_score=await self._reward(completion),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**sampled.extra_fields, "reward_extra_info": {}, "turn_scores": [], "tool_rewards": []},
        )

    async def _reward(self, completion: Sampled) -> float:
        headers = {TOKEN_HEADER: self._server["token"]}
        async with (
            aiohttp.ClientSession(headers=headers, timeout=_WAIT) as session,
            session.post(self._server["url"], json=completion) as reply,
        ):
            reply.raise_for_status()
            return float((await reply.json())[REWARD])
