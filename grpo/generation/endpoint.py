"""Any OpenAI-compatible service as an engine, at one address or many: concurrent requests, each with its own seed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.config.common import Sampling
from grpo.config.engines import Endpoint
from grpo.data.completions import TextCompletion, TextCompletions
from grpo.data.records import Problem
from grpo.data.template import Template, zero_prompt
from grpo.errors import InputError, TrainingStopped
from grpo.http.client import Away, Refused
from grpo.http.connections import Cancellation
from grpo.http.fleet.addresses import Addresses
from grpo.http.fleet.fleet import Fleet
from grpo.http.fleet.member import Member
from grpo.http.fleet.members import Members

_FINISHED = ("stop", "eos", "eos_token", "end_turn", "stop_sequence")
"""Finish reasons, in the words of several services, of a completion that ended by itself."""
_BROKEN_OFF = {"insufficient_system_resource": "503", "abort": "closed", "error": "closed", None: "closed"}
"""Finish reasons of a completion that must be asked for again -> the kind of failure. All others, such as "length",
"max_tokens" and "content_filter", mean that it was cut off."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """One completion to be made. Its seed does not depend on the endpoint, on other requests or on the time."""

    problem: Problem
    sampling: Sampling
    seed: int


class EndpointEngine:
    """Sends one request per completion, so that a failure costs only one completion and each has its own token
    count. `write` may run in several threads at once: the requests of earlier calls go first."""

    def __init__(self, settings: Endpoint, template: Template, zero_template: str | None):
        key = None
        if settings.api_key_env is not None and not (key := os.environ.get(settings.api_key_env)):
            raise InputError(f"engine: environment variable {settings.api_key_env} is not set; api_key_env names it")
        # The addresses of a fleet are not part of the samples, which do not depend on who serves the model.
        self.identity = f"{settings.model} at {settings.base_url or 'a fleet of endpoints'}"
        self._settings = settings
        self._template, self._zero_template = template, zero_template

        def member(url: str) -> Member:
            return Member(url, settings.timeout_s, key, settings.concurrency, settings.requests_per_minute)

        addresses = Addresses([settings.base_url] if settings.base_url else settings.urls, settings.urls_file)
        self.fleet = Fleet(
            Members(addresses, member, settings.retries), self._ask, settings.retries, settings.copy_after
        )

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        asks = [
            _Ask(problem, sampling, seed + number)
            for problem, seed in zip(problems, seeds, strict=True)
            for number in range(count)
        ]
        replies: dict[int, dict[int, tuple[TextCompletion, int]]] = {}
        answers = self.fleet.answers(asks)
        try:
            for position, reply in answers:
                index, number = divmod(position, count)
                of_problem = replies.setdefault(index, {})
                of_problem[number] = reply
                if len(of_problem) == count:
                    texts = [of_problem[n][0] for n in range(count)]
                    yield index, TextCompletions(texts, replies.pop(index)[0][1])
        except Away as error:
            raise TrainingStopped(f"engine: {error}") from None
        except Refused as error:
            raise InputError(
                f"engine: {error.url or self._settings.base_url} refused with {error}; check its address and model"
            ) from None
        finally:  # the caller may have stopped iterating
            answers.close()

    def close(self) -> None:
        """Aborts requests in flight; `write` in other threads raises TrainingStopped."""
        self.fleet.close()

    def _body(self, ask: _Ask) -> tuple[str, dict[str, Any]]:
        sampling, messages = ask.sampling, ask.problem.messages
        body: dict[str, Any] = {
            "model": self._settings.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": ask.seed % 2**31,
            **self._settings.body,
        }
        if self._template == "chat":
            return "/chat/completions", {**body, "messages": messages}
        return "/completions", {**body, "prompt": zero_prompt(messages, self._zero_template)}

    def _ask(self, member: Member, ask: _Ask, cancellation: Cancellation) -> tuple[TextCompletion, int]:
        """One completion, and the number of tokens of its prompt."""
        path, body = self._body(ask)
        reply = member.http.post(member.path + path, body, cancellation=cancellation)
        try:
            choice, usage = reply["choices"][0], reply.get("usage") or {}
            reason = choice["finish_reason"]
            if reason in _BROKEN_OFF:
                raise Away(f"{member.url} broke a completion off (finish_reason {reason!r})", _BROKEN_OFF[reason])
            text = choice["text"] or "" if path == "/completions" else whole(choice["message"])
            tokens, of_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Refused(200, "an answer without choices; is base_url OpenAI-compatible?") from None
        if not isinstance(tokens, int) or not isinstance(of_prompt, int):
            raise Refused(200, "an answer without usage.prompt_tokens and completion_tokens, which length filters need")
        return TextCompletion(text, tokens, reason in _FINISHED), of_prompt


def whole(message: dict[str, Any]) -> str:
    """The whole completion, with its reasoning in think tags. Services that separate the reasoning call it
    `reasoning_content` or `reasoning`; others omit the opening tag that is in their model's chat template."""
    text = message["content"] or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        return f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"
    return f"<think>\n{text}" if "</think>" in text and "<think>" not in text else text
