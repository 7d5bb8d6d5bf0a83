"""The steps of a weight update in vLLM, and the check that it took effect; both in process and over HTTP.

A worker never raises during an update; it records the fault. If several workers share a model, vLLM 0.32 reads only the
answer of the first one that failed, and would take the other answers for answers to its next call.
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
    """vLLM's steps of an update, and the answers of `grpo.generation.vllm.worker.Extension`."""

    def start(self) -> None: ...

    def part(self, **part: Any) -> None:
        """Sends one `grpo.generation.vllm.worker.Part`."""

    def finish(self) -> None: ...

    def label(self, version: str) -> None:
        """Sets the label of completions sampled from now on."""

    def states(self) -> list[dict[str, Any]]:
        """States of the workers, by rank."""


def replace_weights(
    control: Control, weights: Iterable[tuple[str, Tensor]], version: int, send: Callable[[Bucket], None]
) -> None:
    """Runs one update; `send` transfers the tensors of a bucket. Raises TrainingStopped unless every worker has all the
    weights afterwards."""
    try:
        if any(state["updating"] for state in control.states()):
            control.finish()  # an earlier trainer was killed during an update
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
        # if both failed, the worker's fault is the cause
        message = textwrap.shorten(_fault(control) or str(error), 400)
        raise TrainingStopped(f"vllm: version {version} of the weights did not arrive: {message}") from error


def version_of(states: list[dict[str, Any]]) -> int:
    """The version that all workers hold; UNKNOWN before the first update, or if they differ."""
    held = {state["version"] for state in states}
    return held.pop() if len(held) == 1 else UNKNOWN


def check_sampled_by(versions: Iterable[str], expected: int) -> None:
    """Raises TrainingStopped if tokens of a completion were sampled from weights other than those last sent, because
    the server was restarted or another trainer uses it too."""
    for label in versions:
        if expected != UNKNOWN and label != str(expected):
            raise TrainingStopped(f"vllm: a completion was sampled by version {label} of the weights, not {expected}")


def _check(states: list[dict[str, Any]]) -> None:
    for state in states:
        if state["fault"] is not None:
            raise RuntimeError(state["fault"])


def _fault(control: Control) -> str | None:
    """The first fault that a worker recorded. None if there is none, or if no worker answers."""
    try:
        _check(control.states())
    except RuntimeError as error:
        return str(error)
    except OSError:
        pass
    return None
