"""Rewards for an engine that samples elsewhere: a server that scores each completion as this library's trainer would,
and keeps what it scored for metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from grpo.config.jobs import RLJob
from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.errors import TrainingStopped
from grpo.processes.metrics_log import replace_text
from grpo.rewards.functions import Response
from grpo.rewards.registry import total
from grpo.rl.batch import CompletionGroup
from grpo.scoring.reward_weights import reward_weights
from grpo.scoring.scorer import Failures, Scored, Scorer, Scores, responses_of
from grpo.trainers.verl.protocol import REWARD, TOKEN_HEADER, Sampled, ServerAddress

LOCAL = "127.0.0.1"
POLL_S = 0.02
REQUEST_BYTES = 2**28


@dataclass(frozen=True)
class Row:
    """A prompt in the order of training."""

    problem: Problem
    prompt: list[int]
    max_tokens: int


@dataclass
class _Pending:
    row: int
    completion: Completion
    response: Response
    scores: Scores
    reward: asyncio.Future[float]


@dataclass
class _Scored:
    completion: Completion
    response: Response
    breakdown: dict[str, float]
    given: dict[str, float]


class RewardServer:
    """Answers each completion of a row with its reward, from a thread. `address`: a file that only the user may read,
    with a ServerAddress. `host`: this machine's name or address for the others, or LOCAL."""

    def __init__(self, job: RLJob, tokenizer: Any, scorer: Scorer, rows: Sequence[Row], address: Path, host: str):
        self._tokenizer, self._scorer, self._rows = tokenizer, scorer, rows
        settings = job.settings
        self.weights = reward_weights(settings)
        self._group_size, self._max_failure_share = settings.group_size, settings.scoring.max_failure_share
        self._rollout_rows = settings.prompts_per_step * settings.minibatches
        self._failures: dict[int, Failures] = {}
        self._token = secrets.token_hex(32)
        self._pending: list[_Pending] = []
        self._scored: dict[int, list[_Scored]] = {}
        self._failure: BaseException | None = None
        self._closed = False
        started = threading.Event()

        def serve() -> None:
            try:
                asyncio.run(self._serve(address, host, started))
            except Exception as error:
                self._failure = error
            finally:
                started.set()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        started.wait()

    def check(self) -> None:
        """Raises what went wrong in a request."""
        if self._failure is not None:
            raise self._failure

    def take(self, rollout: int) -> tuple[list[CompletionGroup], Failures]:
        """Returns and forgets the groups of a rollout, counted from 0. Raises TrainingStopped if completions of one are
        missing."""
        groups = []
        for number in range(rollout * self._rollout_rows, (rollout + 1) * self._rollout_rows):
            scored, row = self._scored.pop(number, []), self._rows[number]
            if len(scored) != self._group_size:
                raise TrainingStopped(
                    f"verl trained on a step of which {len(scored)} of {self._group_size} completions to problem "
                    f"{row.problem.id} were scored; its log says what became of the others"
                )
            groups.append(
                CompletionGroup(
                    problem=row.problem,
                    prompt=row.prompt,
                    completions=[each.completion for each in scored],
                    responses=[each.response for each in scored],
                    breakdowns=[each.breakdown for each in scored],
                    rewards=torch.tensor([total(each.breakdown, self.weights) for each in scored]),
                    steps=None,
                    ref_logprobs=None,
                    old_logprobs=None,
                    values=None,
                    given=[each.given for each in scored],
                )
            )
        return groups, self._failures.pop(rollout)

    def close(self) -> None:
        self._closed = True
        self._thread.join()

    async def _serve(self, address: Path, host: str, started: threading.Event) -> None:
        app = web.Application(client_max_size=REQUEST_BYTES)
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        with socket.socket() as listener:
            listener.bind((LOCAL if host == LOCAL else "", 0))
            port = listener.getsockname()[1]
            await web.SockSite(runner, listener).start()
            place = ServerAddress(url=f"http://{host}:{port}/", token=self._token, end=self._tokenizer.eos_token_id)
            replace_text(address, json.dumps(place), private=True)
            started.set()
            try:
                while not self._closed:
                    await self._finish_ready()
                    await asyncio.sleep(POLL_S)
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if not secrets.compare_digest(request.headers.get(TOKEN_HEADER, ""), self._token):
            raise web.HTTPForbidden
        sampled: Sampled = await request.json()
        row = self._rows[sampled["row"]]
        tokens = sampled["tokens"]
        completion = Completion(tokens, sampled["logprobs"], tokens[-1] == self._tokenizer.eos_token_id)
        try:
            (response,) = responses_of(self._tokenizer, row.problem, row.prompt, [completion], row.max_tokens)
            scores = self._scorer.start(row.problem, [response])
        except Exception as error:
            self._failure = self._failure or error
            raise
        reward: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(sampled["row"], completion, response, scores, reward))
        return web.json_response({REWARD: await reward})

    async def _finish_ready(self) -> None:
        asked, self._pending = self._pending, []
        for pending in asked:
            if not pending.scores.ready:
                self._pending.append(pending)
                continue
            try:
                scored = await asyncio.to_thread(pending.scores.finish)  # reward models take their time
                pending.reward.set_result(self._keep(pending, scored))
            except Exception as error:
                self._failure = self._failure or error
                pending.reward.set_exception(web.HTTPInternalServerError())

    def _keep(self, pending: _Pending, scored: Scored) -> float:
        """Keeps the scores of a completion and returns its reward. Raises TrainingStopped if it is the last of its
        rollout, and verifiers failed for too many: the engine must not train on them."""
        (breakdown,), (given,) = scored.breakdowns, scored.given
        of_row = self._scored.setdefault(pending.row, [])
        of_row.append(_Scored(pending.completion, pending.response, breakdown, given))
        failures = self._failures.setdefault(pending.row // self._rollout_rows, Failures())
        failures.add(scored.failures)
        if failures.completions == self._rollout_rows * self._group_size:
            failures.stop_above(self._max_failure_share)
        return total(breakdown, self.weights)
