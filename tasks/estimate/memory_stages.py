"""How many bytes the jobs other than reinforcement learning hold on each device, by the same memory model.

SFT, pretraining and reward models are an update without a rollout; sampling is a rollout without an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.config.supervised import Supervised
from tasks.estimate.architecture import Architecture
from tasks.estimate.memory import Lengths, Memory, Parts, Place, memory, moment_bytes

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Held:
    """Bytes on each device: `parts` stay throughout, `phases` are the whole of each phase."""

    parts: Parts
    phases: Parts

    @property
    def phase(self) -> str:
        """The one that takes most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> float:
        return self.phases[self.phase]


def of_rl(a: Architecture, settings: RL, place: Place, lengths: Lengths, reward_models: int = 0) -> Held:
    """Reinforcement learning with so many reward models beside the policy, each as large as it. PPO's value model is
    held as the policy is, with moments and gradients of its own."""
    found = memory(a, settings, place, lengths)
    devices = settings.hardware.processes * settings.hardware.nodes
    more: Parts = {}
    if reward_models:
        more["reward models"] = reward_models * a.weights() * _BYTES[settings.hardware.dtype]
    if settings.method == "ppo" and settings.ppo.value == "model":
        trained = a.weights() * _BYTES[settings.hardware.to_train().dtype]
        more["value model"] = (2 * trained + 2 * a.weights() * moment_bytes(settings)) / devices
    return _all(found, more)


def of_supervised(a: Architecture, settings: Supervised, place: Place) -> Held:
    """An update of all weights, or of adapters, on micro-batches of separate sequences."""
    as_rl = RL(
        steps=1,
        kl_coef=0.0,
        sampling=Sampling(max_new_tokens=1),
        engine=VLLM(kind="server"),
        micro_batch_tokens=settings.micro_batch_tokens,
        optimizer=settings.optimizer,
        hardware=settings.hardware,
        lora=getattr(settings, "lora", None),
    )
    found = memory(a, as_rl, place, Lengths(0, 1))
    held = sum(found.held.values())
    return Held(found.held | found.update, {"loading": found.loading, "update": held + sum(found.update.values())})


def of_sampling(
    a: Architecture,
    sampling: Sampling,
    hardware: Hardware,
    place: Place,
    lengths: Lengths,
    prompts: int,
    group: int,
    engine: VLLM | None = None,
    reward_models: int = 0,
) -> Held:
    """Completions of `prompts` problems, `group` each, by a whole model in each process."""
    as_rl = RL(
        steps=1,
        kl_coef=0.0,
        prompts_per_step=max(1, prompts),
        group_size=max(2, group),
        sampling=sampling,
        engine=engine,
        optimizer={"learning_rate": 1e-6},
        hardware=hardware,
    )
    found = memory(a, as_rl, place, lengths).sampling
    whole = a.weights() * _BYTES[hardware.dtype]
    parts = {name: size for name, size in found.items() if name != "whole model"}
    if engine is None:
        parts["weights"] = whole
    if reward_models:
        parts["reward models"] = reward_models * whole
    return Held(parts, {"sampling": sum(parts.values())})


def _all(found: Memory, more: Parts) -> Held:
    beside = sum(more.values())
    phases = {name: size + beside for name, size in found.phases.items()}
    return Held(found.held | found.sampling | found.measuring | found.update | more, phases)
