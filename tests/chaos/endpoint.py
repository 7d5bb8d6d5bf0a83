"""The endpoint that samples and judges, with replies that depend on the request alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support.faulty_endpoint import FaultyEndpoint

PORT = int(os.environ.get("CHAOS_PORT", "18473"))
"""It is in the configuration of a stage, thus in its key. Suites that run side by side need different ones."""
URL = f"http://127.0.0.1:{PORT}/v1/"
TAGS = ("reference_answer", "answer_to_check")
VERDICTS = {"correctness": "", "safety": "safe", "quality": "good", "refusal": "answered", "verdict": "A>>B"}
"""What is asked for -> what it answers; correct is what equals the reference."""
Plan = Callable[[int, dict[str, Any]], "str | None"]


def answer(number: int, body: dict[str, Any]) -> str:
    """A reply that depends on the request alone: sums as a model writes them, verdicts as a judge does."""
    asked = body["messages"][-1]["content"]
    chance = int(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest(), 16)
    if "Reply with one word" in asked:
        return "Yes."
    for key, verdict in VERDICTS.items():
        if f'"{key}": "..."' in asked:
            if key == "correctness":
                reference, given = (re.findall(f"<{tag}>\\s*(.*?)\\s*</{tag}>", asked, re.S) for tag in TAGS)
                verdict = "correct" if reference[-1:] == given[-1:] else "incorrect"
            return json.dumps({"analysis": "It is.", key: verdict})
    terms = [int(re.sub(r"\s", "", term)) for term in re.findall(r"[+-]?\s*\d+", asked)]
    return f"<think>\n{chance % 1000}\n</think>\n<answer>{sum(terms) + (chance % 4 == 0)}</answer>"


class ChaosEndpoint(FaultyEndpoint):
    """At the port that the configuration names."""

    allow_reuse_address = True

    def server_bind(self) -> None:
        self.server_address = ("127.0.0.1", PORT)
        ThreadingHTTPServer.server_bind(self)


@contextlib.contextmanager
def endpoint(plan: Plan) -> Iterator[FaultyEndpoint]:
    """The endpoint for the length of a block."""
    server = ChaosEndpoint(plan)
    try:
        yield server
    finally:
        server.close()
