"""Chooses a job's sampler if its settings name no engine: on a GPU, the fastest one installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.config.common import Hardware, Sampling
from grpo.generation.vllm.request import COLDEST
from grpo.model.loading import choose_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The name of a sampler, as in `hardware.sampler`, and why it was chosen."""

    name: str
    reason: str


@dataclass(frozen=True)
class Needs:
    """Requirements of a job on its sampler."""

    sampling: Sampling | None = None  # with log-probabilities; None: they are not needed
    others: Sequence[Sampling] = ()  # without
    ahead: bool = False  # whether it samples while the policy trains


def choose_sampler(hardware: Hardware, needs: Needs) -> Choice:
    """Chooses vLLM in this process if it is installed on a GPU, else our own sampler. On a GPU, logs the choice."""
    choice = _choice(hardware, needs, choose_device(hardware).type)
    if choose_device(hardware).type == "cuda" or hardware.sampler != "auto":
        logger.warning("samples with %s: %s", choice.name, choice.reason)
    return choice


def _choice(hardware: Hardware, needs: Needs, device: str) -> Choice:
    if hardware.sampler != "auto":
        return Choice(hardware.sampler, "hardware.sampler says so")
    if device != "cuda":
        return Choice("own", f"it is the fastest on {device}")
    if needs.ahead:
        return Choice("own", "rollouts_ahead keeps a copy of the policy")
    if needs.sampling is not None and needs.sampling.top_p < 1:
        return Choice("own", "others have no log-probabilities at this top_p")
    if any(each.temperature < COLDEST for each in (needs.sampling, *needs.others) if each is not None):
        return Choice("own", f"others sample at a temperature of {COLDEST} or more")
    if has_vllm():
        return Choice("vllm", "vLLM is installed; hardware.sampler = 'own' or 'continuous' takes another")
    return Choice("own", "vLLM is not installed")


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None
