"""Simulates OpenAI-compatible endpoints with the latencies of continuous batching, and their faults.

    python -m benchmarks.fleet_simulator --log FILE [--endpoints 64] [--faults stragglers deaths]

Prints the addresses as one line of JSON. After SIGTERM, FILE has what each endpoint did. An endpoint works on up to
SLOTS requests at once; each of n requests gets a token every BASE_S * (1 + SLOWER * (n - 1)) seconds. The number of
tokens is lognormal and follows from the request's seed, so it is the same at every endpoint. Times of
requests are divided by SCALE; those of faults are not, and count from the first request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

SCALE = 6.0
SLOTS = 2
BASE_S, SLOWER = 0.03, 0.15
FIRST_TOKEN_S, FIRST_TOKEN_SIGMA = 0.4, 0.5
TOKENS, TOKENS_SIGMA, TOKENS_MAX = 800, 0.6, 4096
SLOW, SLOW_FACTOR = 6, 3.0
HUNG, HANGS_AFTER_S, HANGS_S = 2, 10, 30
DYING, FAILING, FAILING_SHARE, SMALL, SMALL_SLOTS = 8, 4, 0.05, 6, 1


def tokens_of(seed: int) -> int:
    """Length of the completion of a request."""
    return max(1, min(TOKENS_MAX, int(random.Random(seed).lognormvariate(math.log(TOKENS), TOKENS_SIGMA))))


class SimulatedEndpoint:
    """Progress of the requests in a batch is shared: `_tokens` is how many tokens a request got that was always in it,
    and a request of k tokens that joins at `_tokens` is done at `_tokens + k`."""

    def __init__(self, slots: int = SLOTS, slow: float = 1.0):
        self.slots, self.token_s = slots, BASE_S * slow / SCALE
        self.failing = 0.0
        self.hung = self.up = False
        self.log: list[tuple[float, int, bool]] = []  # (time, requests in work, whether it is up)
        self.done_tokens = self.refused = self.failed = 0
        self._room = asyncio.Semaphore(SLOTS)
        self._tokens, self._at, self._working, self._in_work = 0.0, 0.0, 0, 0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers, self._timer = itertools.count(), None
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    def rate(self) -> float:
        """Tokens per second when it is full."""
        return self.slots / (self.token_s * (1 + SLOWER * (self.slots - 1)))

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=128)
        self.port = self._server.sockets[0].getsockname()[1]
        self.up = True
        self._note(0)

    def die(self) -> None:
        """Closes the port and drops every connection."""
        assert self._server is not None
        self._server.close()
        self.up = False
        for writer in self._writers:
            writer.transport.abort()
        self._note(0)

    def _note(self, change: int) -> None:
        self._in_work += change
        self.log.append((asyncio.get_running_loop().time(), self._in_work, self.up and not self.hung))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, reply = await self._unless_left(reader, self._reply(body) if body else _no_models())
                text = json.dumps(reply).encode()
                writer.write(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def _unless_left(self, reader: asyncio.StreamReader, reply: Any) -> tuple[int, dict[str, Any]]:
        """The reply; stops working on it when the client closes the connection."""
        work, left = asyncio.ensure_future(reply), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionResetError
            return work.result()
        finally:
            for task in (work, left):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _reply(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        began.set()
        if self.hung:
            await asyncio.sleep(3600)
        if self._in_work >= self.slots and self.slots < SLOTS:
            self.refused += 1
            return 429, {"error": {"message": "too many requests"}}
        if random.random() < self.failing:
            self.failed += 1
            return 500, {"error": {"message": "out of memory"}}
        seed = body["seed"]
        tokens = tokens_of(seed)
        async with self._room:
            self._note(1)
            try:
                await asyncio.sleep(FIRST_TOKEN_S / SCALE * random.lognormvariate(0, FIRST_TOKEN_SIGMA))
                await self._decode(tokens)
            finally:
                self._note(-1)
        self.done_tokens += tokens
        content = f"<think>\n{seed}\n</think>\n<answer>{seed % 10}</answer>"
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 16, "completion_tokens": tokens}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    async def _decode(self, tokens: int) -> None:
        self._advance(1)
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._tokens + tokens, next(self._numbers), end))
        self._set_timer()
        try:
            await end
        finally:
            self._advance(-1)
            self._set_timer()

    def _advance(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._working:
            self._tokens += (now - self._at) / (self.token_s * (1 + SLOWER * (self._working - 1)))
        self._at, self._working = now, self._working + change

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and (self._ends[0][2].done() or self._ends[0][0] <= self._tokens):
            end = heapq.heappop(self._ends)[2]
            if not end.done():
                end.set_result(None)
        if self._ends:
            wait = (self._ends[0][0] - self._tokens) * self.token_s * (1 + SLOWER * (max(1, self._working) - 1))
            self._timer = asyncio.get_running_loop().call_later(wait, self._end_first)

    def _end_first(self) -> None:
        self._advance(0)
        if self._ends:  # rounding must not end it an instant too early for ever
            self._tokens = max(self._tokens, self._ends[0][0])
        self._set_timer()


async def _no_models() -> tuple[int, dict[str, Any]]:
    return 200, {"data": []}


began = asyncio.Event()


async def _deaths(endpoint: SimulatedEndpoint, chance: random.Random) -> None:
    await began.wait()
    while True:
        await asyncio.sleep(chance.uniform(5, 30))
        endpoint.die()
        await asyncio.sleep(chance.uniform(3, 10))
        await endpoint.start()


async def _hang(endpoint: SimulatedEndpoint) -> None:
    await began.wait()
    await asyncio.sleep(HANGS_AFTER_S)
    for endpoint.hung in (True, False):
        endpoint._note(0)
        await asyncio.sleep(HANGS_S)


async def simulate(count: int, faults: list[str], log: Path) -> None:
    chance = random.Random(1)
    endpoints = [SimulatedEndpoint() for _ in range(count)]
    odd = iter(chance.sample(range(count), min(count, SLOW + HUNG + DYING + FAILING + SMALL)))
    tasks = []
    if "stragglers" in faults:
        for index in itertools.islice(odd, SLOW):
            endpoints[index] = SimulatedEndpoint(slow=SLOW_FACTOR)
        tasks += [asyncio.create_task(_hang(endpoints[index])) for index in itertools.islice(odd, HUNG)]
    if "deaths" in faults:
        dying = [endpoints[index] for index in itertools.islice(odd, DYING)]
        tasks += [asyncio.create_task(_deaths(each, random.Random(n))) for n, each in enumerate(dying)]
        for index in itertools.islice(odd, FAILING):
            endpoints[index].failing = FAILING_SHARE
        for index in itertools.islice(odd, SMALL):
            endpoints[index] = SimulatedEndpoint(slots=SMALL_SLOTS)
    for endpoint in endpoints:
        await endpoint.start()
    print(json.dumps([f"http://127.0.0.1:{endpoint.port}/v1" for endpoint in endpoints]), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    fields = ("slots", "log", "done_tokens", "refused", "failed")
    log.write_text(json.dumps([{name: getattr(e, name) for name in fields} | {"rate": e.rate()} for e in endpoints]))
    os._exit(0)  # without a traceback for each open connection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoints", type=int, default=64)
    parser.add_argument("--faults", nargs="*", default=[], choices=["stragglers", "deaths"])
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(simulate(args.endpoints, args.faults, args.log))


if __name__ == "__main__":
    main()
