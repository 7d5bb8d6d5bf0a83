"""A stand-in for a vLLM server with --enable-sleep-mode, and what the ranks that share it do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import AutoConfig

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.distributed.process_group import Parallel
from grpo.errors import TrainingStopped
from grpo.generation.vllm.client import ServerVLLM
from grpo.generation.vllm.request import LOGPROBS
from grpo.generation.vllm.weight_transfer import SHAPE


class SleepingServer:
    """Answers each generation after `SLOW_S` seconds with one token, and refuses what is in `refuses`. `events`: what
    happened, in order."""

    SLOW_S = 1.0

    def __init__(self, model: str, refuses: Collection[str] = ()):
        config = AutoConfig.from_pretrained(model)
        worker = {"sleeps": True, "logprobs": LOGPROBS, "model": {name: getattr(config, name) for name in SHAPE}}
        choice = {"index": 0, "finish_reason": "length", "weight_versions": [{"version": "1"}], "token_ids": [5]}
        served = {"id": "policy", "max_model_len": 100}
        self.answers: dict[str, Any] = {
            "/v1/models": {"data": [served]},
            "/collective_rpc": {"results": [worker]},
            "/inference/v1/generate": {"choices": [{**choice, "logprobs": {"content": [{"logprob": -1.0}]}}]},
        }
        self.events: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if path in ("/sleep", "/wake_up"):
                    server.events.append(path)
                if path == "/inference/v1/generate":
                    server.events.append("begun")
                    time.sleep(server.SLOW_S)
                    server.events.append("ended")
                body = json.dumps(server.answers.get(path)).encode()
                self.send_response(400 if path in refuses else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> SleepingServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def sample_in_rounds(parallel: Parallel, model: str, url: str, rounds: int) -> list[int]:
    """What every rollout does. Only the last rank has a prompt, as when dynamic sampling replaces a single group.
    Returns the numbers of completions."""
    engine = ServerVLLM(model, VLLM(kind="server", url=url), eos_id=0)
    engine._held = 1  # instead of an update
    prompts = [[5]] if parallel.rank == parallel.world - 1 else []
    counts = []
    for number in range(rounds):
        engine.wake()
        counts.append(len(list(engine.sample(prompts, 1, Sampling(max_new_tokens=1), [number] * len(prompts)))))
        engine.sleep()
    return counts


def faults(parallel: Parallel, model: str, url: str, call: str) -> str:
    """Why an engine's call stopped the training."""
    engine = ServerVLLM(model, VLLM(kind="server", url=url), eos_id=0)
    try:
        getattr(engine, call)()
    except TrainingStopped as stopped:
        return str(stopped)
    return "none"
