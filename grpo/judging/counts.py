"""Counts of a judge's requests and verdicts. The counts are consistent with each other and can be summed over shards.

Names, all of them sums:

- items, items/undecided: judgments that callers requested, and those without a verdict; items/no_majority: undecided
  items whose votes did not agree.
- asked: questions put to a model (one per vote of an item). Each ends in exactly one of the outcomes:
  outcome/decided, outcome/in_text (repaired: the object stood inside other text), outcome/asked_again (repaired: the
  model corrected its reply), or outcome/KIND for a kind of UNDECIDED.
- remembered: replies found in the cache, so that nothing was asked.
- asked_again: questions whose reply could not be read, so that the model was asked once more.
- compared/first, /second, /tie: comparisons won by the response shown first or second, and ties; both_orders: pairs of
  comparisons of the same two responses in both orders; flipped: such pairs that did not name the same winner.
- requests: all requests to an endpoint = answered + every fault/KIND; retries and probes: requests made only because of
  faults. Without faults, requests + remembered = asked + asked_again.
- prompt_tokens, completion_tokens: as the engine counts them. seconds: spent judging, waits included.

A run that was stopped and resumed has the same verdicts as an uninterrupted one; its cost differs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping

UNDECIDED = {
    "empty": "the reply holds no text, or nothing but reasoning",
    "no_json": "no JSON object can be read in it",
    "wrong_keys": "an object with other keys, a key twice, or an analysis that is no text",
    "wrong_verdict": "another word than those asked for",
    "contradictory": "several verdicts outside quotation marks, and they differ",
    "too_long": "cut off at the token limit before the verdict",
    "prompt_too_long": "the prompt does not fit the model",
    "refused": "the endpoint refused this prompt, though not others: too long for it, or not allowed",
    "no_reply": "the endpoint failed again and again on this prompt, though not on others",
}

_TOKENS = ("prompt_tokens", "completion_tokens")
_COST = ("requests", "answered", "fault/", "retries", "probes", "remembered", *_TOKENS, "seconds")


class JudgeCounts:
    """Sums by name. Thread-safe."""

    def __init__(self, values: Mapping[str, float] | None = None):
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.merge(values or {})

    def add(self, name: str, amount: float = 1) -> None:
        self.merge({name: amount})

    def merge(self, values: Mapping[str, float]) -> None:
        """Adds the `to_dict` of another JudgeCounts."""
        with self._lock:
            for name, amount in values.items():
                self._values[name] += amount  # type: ignore[assignment]

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, sorted by name, without zeros."""
        with self._lock:
            return {name: value for name, value in sorted(self._values.items()) if value}

    def verdicts(self) -> dict[str, float]:
        """The part of `to_dict` that depends only on questions and replies: no time, requests or faults."""
        return {name: value for name, value in self.to_dict().items() if not name.startswith(_COST)}

    def cost(self) -> dict[str, float]:
        """The rest of `to_dict`."""
        return {name: value for name, value in self.to_dict().items() if name.startswith(_COST)}

    def __getitem__(self, name: str) -> float:
        with self._lock:
            return self._values[name]

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the block's seconds, even if it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add("seconds", time.monotonic() - began)

    def shares(self) -> dict[str, float]:
        """The most important shares. Shares of an empty set are omitted.

        undecided_share of items; repaired_share of questions; position_bias: share of pairs asked in both orders whose
        winner changed with the order; first_share: how often the first response won, ties excluded; 0.5 means no bias.
        """
        of = self.to_dict().get
        repaired = of("outcome/in_text", 0) + of("outcome/asked_again", 0)
        won = of("compared/first", 0) + of("compared/second", 0)
        parts = {
            "undecided_share": (of("items/undecided", 0), of("items", 0)),
            "repaired_share": (repaired, of("asked", 0)),
            "position_bias": (of("flipped", 0), of("both_orders", 0)),
            "first_share": (of("compared/first", 0), won),
        }
        return {name: part / whole for name, (part, whole) in parts.items() if whole}
