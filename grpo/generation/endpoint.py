"""Any OpenAI-compatible service as an engine: concurrent requests with retries, each with its own seed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlsplit

from grpo.config.common import Sampling
from grpo.config.engines import Endpoint
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem
from grpo.data.template import Template, zero_prompt
from grpo.errors import InputError, TrainingStopped
from grpo.http.client import Away, Http, Refused
from grpo.http.rate_limit import Pace


class EndpointEngine:
    """Sends one request per completion, so that a failure costs only one completion and each has its own token
    count."""

    def __init__(self, settings: Endpoint, template: Template, zero_template: str | None):
        key = None
        if settings.api_key_env is not None and not (key := os.environ.get(settings.api_key_env)):
            raise InputError(f"engine: environment variable {settings.api_key_env} is not set; api_key_env names it")
        self.identity = f"{settings.model} at {settings.base_url}"
        self._settings, self._key = settings, key
        self._pace = Pace(settings.requests_per_minute)
        self._template, self._zero_template = template, zero_template
        self._path = urlsplit(settings.base_url).path.rstrip("/")

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        settings = self._settings
        http = Http(settings.base_url, settings.timeout_s, settings.retries, self._key, proxy=True, pace=self._pace)
        pool = ThreadPoolExecutor(settings.concurrency)
        futures: dict[Future[tuple[TextCompletion, int]], tuple[int, int]] = {}
        for index, (problem, seed) in enumerate(zip(problems, seeds, strict=True)):
            for number in range(count):
                body = self._body(problem, sampling, seed + number)
                futures[pool.submit(self._ask, http, body)] = index, number
        replies: dict[int, dict[int, tuple[TextCompletion, int]]] = {}
        try:
            for future in as_completed(futures):
                index, number = futures.pop(future)
                of_problem = replies.setdefault(index, {})
                of_problem[number] = future.result()
                if len(of_problem) == count:
                    texts = [of_problem[n][0] for n in range(count)]
                    yield index, TextCompletions(texts, replies.pop(index)[0][1])
        except Away as error:
            raise TrainingStopped(f"engine: {error}") from None
        except Refused as error:
            raise InputError(f"engine: {settings.base_url} refused with {error}; check base_url and model") from None
        finally:  # the caller may have stopped iterating
            pool.shutdown(wait=False, cancel_futures=True)
            http.abandon()
            pool.shutdown()

    def close(self) -> None:
        pass

    def _body(self, problem: Problem, sampling: Sampling, seed: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed % 2**31,
            **self._settings.body,
        }
        if self._template == "chat":
            return "/chat/completions", {**body, "messages": problem.messages}
        return "/completions", {**body, "prompt": zero_prompt(problem.messages, self._zero_template)}

    def _ask(self, http: Http, request: tuple[str, dict[str, Any]]) -> tuple[TextCompletion, int]:
        path, body = request
        reply = http.post(self._path + path, body)
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            text = choice["text"] if path == "/completions" else whole(choice["message"])
            finished = choice["finish_reason"] != "length"
            return TextCompletion(text, int(usage.get("completion_tokens", 0)), finished), int(
                usage.get("prompt_tokens", 0)
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Refused(200, "an answer without choices; is base_url OpenAI-compatible?") from None


def whole(message: dict[str, Any]) -> str:
    """The whole completion, with its reasoning in think tags. Services that separate the reasoning call it
    `reasoning_content` or `reasoning`; others omit the opening tag that is in their model's chat template."""
    text = message["content"] or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        return f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"
    return f"<think>\n{text}" if "</think>" in text and "<think>" not in text else text
