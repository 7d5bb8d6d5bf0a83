"""Chat completions from an OpenAI-compatible endpoint that may fail in any way or be unreachable for a while.

A failed request is retried with growing delays. If it has failed too often, the question is whether the request or the
endpoint is at fault. The request is at fault if the endpoint has answered other requests, or else a probe, and the
request then fails once more; it gets no reply. Otherwise the endpoint is away, and the request is retried until nothing
has been answered for too long, which raises. So a prompt that an endpoint cannot handle does not stop a stage, and
prompts do not become "undecided" because an endpoint is away or just coming back.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grpo.config.judge import JudgeSettings
from grpo.data.records import Message
from grpo.errors import InputError
from grpo.http.client import Away, Http, Refused, backoff, tls_context
from grpo.http.rate_limit import Pace
from grpo.judging.chat_models import OnReply
from grpo.judging.counts import JudgeCounts
from grpo.judging.replies import Reply

_LONGEST_WAIT_S = 60.0
_BUSY = {"429", "503"}
_MISTAKES = {401, 404, 405}
"""HTTP statuses that do not depend on the prompt. 403 may: gateways that moderate answer it to a flagged prompt."""


class Fault(NamedTuple):
    """A failed request. `kind`: the one of grpo.http.client.Away, "not_json", "no_choices", or "refused" with its
    `status`."""

    kind: str
    message: str
    status: int = 0
    wait_s: float | None = None


class ChatEndpoint:
    """A chat endpoint. Thread-safe; the limits on rate and concurrency apply to all threads together."""

    def __init__(self, settings: JudgeSettings, key: str | None, counts: JudgeCounts):
        assert settings.base_url is not None  # JudgeSettings checks
        self.settings, self.key, self.counts = settings, key, counts
        where = urlsplit(settings.base_url)
        self.path = where.path.rstrip("/") + "/chat/completions"
        self.tls = tls_context() if where.scheme == "https" else None
        self.pace = Pace(settings.requests_per_minute)
        self.slots = threading.Semaphore(settings.concurrency)
        self.answered_at = -math.inf
        self.probing = threading.Lock()
        self._closed = False
        self._lock = threading.Lock()
        self._asking: set[_Asking] = set()

    def ask_all(self, bodies: Sequence[dict[str, Any]], on_reply: OnReply | None = None) -> list[Reply]:
        """Returns replies to the requests, in order. If `on_reply.begin` raises, that exception is raised after the
        requests in progress have ended.

        Raises InputError if the endpoint refuses every request, and ConnectionError if it has been away for too long or
        `close` was called; requests in progress are then aborted.
        """
        asking = _Asking(self)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("judge: closed")
            self._asking.add(asking)
        with ThreadPoolExecutor(min(self.settings.concurrency, max(1, len(bodies)))) as pool:
            futures = [pool.submit(asking.watched, index, body, on_reply) for index, body in enumerate(bodies)]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in ended:
                    if isinstance(future.exception(), _NotBegun):
                        pool.shutdown(cancel_futures=True)
                    future.result()
                return [future.result() for future in futures]
            except _NotBegun as error:
                raise error.reason from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                asking.give_up()
                with self._lock:
                    self._asking.discard(asking)

    def close(self) -> None:
        """Aborts the requests of all threads."""
        with self._lock:
            self._closed = True
            for asking in self._asking:
                asking.give_up()


class _NotBegun(Exception):
    """`on_reply.begin` raised."""

    def __init__(self, reason: Exception):
        super().__init__(reason)
        self.reason = reason


class _Asking:
    """State of one batch of requests."""

    def __init__(self, endpoint: ChatEndpoint):
        settings = endpoint.settings
        self._endpoint, self._settings, self._counts = endpoint, settings, endpoint.counts
        self._http = Http(
            str(settings.base_url),
            settings.timeout_s,
            retries=0,
            key=endpoint.key,
            proxy=True,
            pace=endpoint.pace,
            repeatable=True,
            tls=endpoint.tls,
        )
        self._url = self._http.url + endpoint.path
        self._began = time.monotonic()  # an outage cannot have begun earlier
        self._stop = threading.Event()

    def give_up(self) -> None:
        self._stop.set()
        self._http.abandon()

    def watched(self, index: int, body: dict[str, Any], on_reply: OnReply | None) -> Reply:
        if on_reply is None:
            return self.reply(body)
        try:
            on_reply.begin(index)
        except Exception as error:
            raise _NotBegun(error) from None
        reply = None
        try:
            reply = self.reply(body)
        finally:
            on_reply.end(index, reply)
        return reply

    def reply(self, body: dict[str, Any]) -> Reply:
        began, failures, failed_at = time.monotonic(), 0, math.inf
        for attempt in itertools.count():
            answered_before = self._endpoint.answered_at
            got = self._attempt(body)
            if isinstance(got, Reply):
                return got
            failed_before, failed_at = failed_at, time.monotonic()
            if got.kind == "refused":
                if got.status in _MISTAKES:
                    raise self._refusal(got)
                if self._endpoint.answered_at > began or self._answers_a_probe(got):
                    return Reply("", missing="refused")
            elif self._too_often(failures := failures + (got.kind not in _BUSY), began):
                if answered_before > failed_before:  # others were answered since, and it failed again
                    return Reply("", missing="no_reply")
                self._answers_a_probe(got)  # then the next attempt decides
            if (away_s := _since(max(self._endpoint.answered_at, self._began))) > self._settings.away_max_s:
                raise ConnectionError(
                    f"judge: {self._url} has answered nothing for {away_s:.0f} s, at last with: {got.message}; nothing "
                    "is lost: run again when it is back, or set away_max_s to wait longer"
                )
            self._counts.add("retries")
            longer = backoff(attempt, self._settings.backoff_s, _LONGEST_WAIT_S)
            self._stop.wait(longer if got.wait_s is None else got.wait_s)
        raise AssertionError  # itertools.count is infinite

    def _too_often(self, failures: int, began: float) -> bool:
        return failures > self._settings.retries or _since(began) > self._settings.away_max_s

    def _answers_a_probe(self, fault: Fault) -> bool:
        """Whether the endpoint answers a probe; False while another request is probing. Raises InputError if it refuses
        permanently."""
        if not self._endpoint.probing.acquire(blocking=False):
            return False
        try:
            self._counts.add("probes")
            got = self._attempt(self._probe())
        finally:
            self._endpoint.probing.release()
        if isinstance(got, Reply):
            return True
        if got.kind == "refused":
            raise self._refusal(got)
        if got.kind in ("not_json", "no_choices") and self._endpoint.answered_at == -math.inf:
            raise InputError(f"judge: {self._url} answers, but {got.message}; is base_url OpenAI-compatible?")
        return False

    def _probe(self) -> dict[str, Any]:
        return request_body(self._settings, [{"role": "user", "content": "Reply with one word: yes."}], 0)

    def _refusal(self, fault: Fault) -> InputError:
        return InputError(
            f"judge: {self._url} refused with {fault.message}; check base_url, model, api_key_env, max_tokens and "
            "request"
        )

    def _attempt(self, body: dict[str, Any]) -> Reply | Fault:
        with self._endpoint.slots:
            if self._stop.is_set():
                raise ConnectionAbortedError("given up")
            self._counts.add("requests")
            got = self._post(body)
        if isinstance(got, Fault):
            if self._stop.is_set():
                raise ConnectionAbortedError("given up")
            self._counts.add(f"fault/{got.kind}")
        else:
            self._counts.add("answered")
            self._endpoint.answered_at = time.monotonic()
        return got

    def _post(self, body: dict[str, Any]) -> Reply | Fault:
        try:
            answer = self._http.post(self._endpoint.path, body)
        except Away as error:
            return Fault(error.kind, str(error), wait_s=error.wait_s)
        except Refused as error:
            return Fault("not_json" if error.status == 200 else "refused", str(error), error.status)
        try:
            choice = answer["choices"][0]
            content, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (LookupError, TypeError, AttributeError):
            return Fault("no_choices", f"without choices: {str(answer)[:80]!r}")
        tokens = self._count_tokens(answer.get("usage"))
        return Reply(content if isinstance(content, str) else "", cut, tokens=tokens)

    def _count_tokens(self, usage: Any) -> int:
        total = 0
        for name in ("prompt_tokens", "completion_tokens"):
            if isinstance(usage, dict) and isinstance(usage.get(name), int):
                self._counts.add(name, usage[name])
                total += usage[name]
        return total


def request_body(settings: JudgeSettings, dialogue: list[Message], draw: int) -> dict[str, Any]:
    """Body of a request. `draw`: number of the repetition of a dialogue; each has its own seed, the same in every
    run."""
    body: dict[str, Any] = {
        "model": settings.model,
        "messages": dialogue,
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }
    if settings.seed is not None:
        body["seed"] = zlib.crc32(json.dumps([settings.seed, draw, dialogue]).encode()) % 2**31
    return {name: value for name, value in {**body, **settings.request}.items() if value is not None}


def _since(moment: float) -> float:
    return time.monotonic() - moment
