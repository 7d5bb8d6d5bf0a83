"""The order in which vLLM gets new weights, and how it is known that it has them: the same inside the trainer and over
HTTP.

A worker never raises during an update, but notes what went wrong: where several of them share a model, vLLM 0.32 reads
only the answer of the first that failed, and would take the others' for answers to its next question.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from grpo.errors import TrainingStopped
from grpo.generation.vllm.weight_transfer import UNKNOWN, Fingerprint, buckets

Bucket = list[tuple[str, Tensor]]


class Control(Protocol):
    """vLLM's own steps of an update, and `grpo.generation.vllm.worker.Extension`'s answers."""

    def start(self) -> None: ...

    def part(self, **part: Any) -> None:
        """One of the kinds of `grpo.generation.vllm.worker.Part`."""

    def finish(self) -> None: ...

    def label(self, version: str) -> None:
        """What completions are marked with that are sampled from now on."""

    def states(self) -> list[dict[str, Any]]:
        """Of each worker."""


def replace_weights(
    control: Control, weights: Iterable[tuple[str, Tensor]], version: int, send: Callable[[Bucket], None]
) -> None:
    """`send` moves the tensors of a bucket. Raises TrainingStopped unless every worker holds all of the weights."""
    try:
        if any(state["updating"] for state in control.states()):
            control.finish()  # a trainer was killed in the middle of an update
        control.label(str(UNKNOWN))
        control.start()
        sent = Fingerprint()
        try:
            for bucket in buckets(weights):
                send(bucket)
                _check(control.states())
                for name, tensor in bucket:
                    sent.add(name, tensor)
            control.part(whole={"version": version, **vars(sent)})
        finally:
            control.finish()
        states = control.states()
        _check(states)
        if (held := version_of(states)) != version:
            raise RuntimeError(f"the workers hold {held}")
        control.label(str(version))
    except (OSError, RuntimeError) as error:
        message = textwrap.shorten(_fault(control) or str(error), 400)  # theirs is the cause where both failed
        raise TrainingStopped(f"vllm: version {version} of the weights did not arrive: {message}") from error


def version_of(states: list[dict[str, Any]]) -> int:
    """The version that all workers hold; UNKNOWN before the first update, or where they differ."""
    held = {state["version"] for state in states}
    return held.pop() if len(held) == 1 else UNKNOWN


def check_sampled_by(versions: Iterable[str], expected: int) -> None:
    """TrainingStopped when tokens of a completion came from other weights than the last that were sent: from a server
    that was started anew meanwhile, or that another trainer uses too."""
    for found in versions:
        if expected != UNKNOWN and found != str(expected):
            raise TrainingStopped(f"vllm: a completion was sampled by version {found} of the weights, not {expected}")


def _check(states: list[dict[str, Any]]) -> None:
    for state in states:
        if state["fault"] is not None:
            raise RuntimeError(state["fault"])


def _fault(control: Control) -> str | None:
    """What a worker noted, if any did and can still be asked."""
    try:
        _check(control.states())
    except RuntimeError as error:
        return str(error)
    except OSError:
        pass
    return None
