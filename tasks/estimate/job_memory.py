"""Memory per device of whole jobs: RL with its reward and value models, supervised training, sampling.

All use the memory model of a GRPO step: SFT, pretraining and reward models are an update without a rollout, and
sampling is a rollout without an update.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.config.supervised import Supervised
from grpo.data.token_shards import SAMPLE_BYTES
from grpo.rl.method_table import value_model
from tasks.estimate.architecture import Architecture
from tasks.estimate.engine import EngineMemory
from tasks.estimate.memory import (
    DeviceMemory,
    Draw,
    Lengths,
    Parts,
    devices,
    engine_of,
    loads_whole,
    measuring_weights,
    moment_bytes,
    sampling_parts,
    step_memory,
)

_Settings = TypeVar("_Settings", Supervised, RL)
_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 2e9
"""Bytes that Python, torch, CUDA and other libraries take in a process. Assumed."""
CPU_TRAINING, CPU_SAMPLING = 0.7e9, 0.5e9
"""Bytes that a trainer on a CPU holds in addition to the counted tensors: data and tokenizer in Python, compiled
kernels, memory kept by the allocator, PyTorch's buffers for each thread. Upper bounds of what `benchmarks/estimates.py`
measures with `tiny`. On CUDA, counting starts after these allocations."""
ROLLOUT_TOKEN_BYTES = 60
"""Bytes per token of a rollout: a Python integer, and log-probabilities and advantages in float32. The whole rollout is
counted for each process."""


@dataclass(frozen=True)
class JobMemory:
    """Bytes on each device: `parts` by what they hold, `phases` as totals. `engine`: vLLM in the process, if there is
    one."""

    parts: Parts
    phases: Parts
    engine: EngineMemory | None = None

    @property
    def phase(self) -> str:
        """The phase with the largest total."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> float:
        return self.phases[self.phase]


def rl_memory(
    a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths, reward_models: int = 0
) -> JobMemory:
    """Memory of reinforcement learning. Each reward model is as large as the policy, and scores a layer at a time. A
    value model has its own gradients and moments."""
    step = step_memory(a, settings, device, lengths)
    more: Parts = {}
    phases = step.phases
    if reward_models:
        itemsize = _BYTES[settings.hardware.dtype]
        more["reward models"] = reward_models * a.weights() * itemsize / devices(settings)
        gathered = measuring_weights(a) * itemsize if devices(settings) > 1 else 0
        phases["measuring"] = max(phases["measuring"], sum(step.held.values()) + gathered)
    if value_model(settings) == "model":
        trained = a.weights() * _BYTES[settings.hardware.to_train().dtype]
        more["value model"] = (2 * trained + 2 * a.weights() * moment_bytes(settings)) / devices(settings)
    return _with_program(
        JobMemory(
            step.held | step.sampling | step.reference_pass | step.update | more,
            {name: size + sum(more.values()) for name, size in phases.items()},
            engine_of(a, settings, device, lengths),
        ),
        device,
        CPU_SAMPLING,
    )


def supervised_memory(a: Architecture, settings: Supervised, device: DeviceMemory) -> JobMemory:
    """Memory of an update of all weights or of adapters, on micro-batches of separate sequences. Another project's
    trainer is taken to need what this library's does."""
    as_rl = RL(
        steps=1,
        kl_coef=0.0,
        sampling=Sampling(max_new_tokens=1),
        engine=VLLM(kind="server"),
        micro_batch_tokens=settings.micro_batch_tokens,
        optimizer=settings.optimizer.model_copy(update={"kind": settings.optimizer.kind.replace("muon", "adamw")}),
        hardware=settings.hardware.model_copy(update={"trainer": None}),
        lora=getattr(settings, "lora", None),
    )
    step = step_memory(a, as_rl, device, Lengths(0, 1))
    phases = {name: step.phases[name] for name in ("loading", "update")}
    if loads_whole(settings):
        phases["loading"] = max(phases["loading"], a.weights() * _BYTES[settings.hardware.to_train().dtype])
    return _with_program(JobMemory(step.held | step.update, phases), device, CPU_TRAINING)


def sampling_memory(
    a: Architecture,
    drawn: Draw,
    hardware: Hardware,
    device: DeviceMemory,
    lengths: Lengths,
    engine: VLLM | None = None,
    reward_models: int = 0,
) -> JobMemory:
    """Memory of sampling alone. Each process holds a whole model, unless its vLLM divides it among devices of its
    own."""
    if engine is not None and hardware.processes * hardware.nodes > 1:
        # Actors on Ray have a whole vLLM each, where RL counts a process for each of its devices.
        hardware = hardware.model_copy(update={"processes": hardware.processes * engine.tensor_parallel_size})
    as_rl = RL(
        steps=1,
        kl_coef=0.0,
        sampling=drawn.sampling,
        engine=engine,
        optimizer={"learning_rate": 0.1},  # nothing is trained
        hardware=hardware,
    )
    sampled = sampling_parts(a, as_rl, device, lengths, [drawn])
    whole = a.weights() * _BYTES[hardware.dtype]
    parts = {name: size for name, size in sampled.items() if name != "whole model"}
    if engine is None:
        parts["weights"] = whole
    if reward_models:
        parts["reward models"] = reward_models * whole
    engine_needs = engine_of(a, as_rl, device, lengths)
    return _with_program(JobMemory(parts, {"sampling": sum(parts.values())}, engine_needs), device, CPU_SAMPLING)


def copying_memory(size: float, device: DeviceMemory) -> JobMemory:
    """Memory of copying a model of which `size` bytes are on the device."""
    return _with_program(JobMemory({"weights": size}, {"loading": size}), device, CPU_TRAINING)


def at_most(settings: _Settings, tokens: float) -> _Settings:
    """Settings with micro-batches limited to the `tokens` that a process trains on in one step; processes that share
    sequences share micro-batches as well."""
    size = min(settings.micro_batch_tokens, max(64, round(tokens * settings.hardware.sharing)))
    return settings.model_copy(update={"micro_batch_tokens": size})


def larger(one: JobMemory | None, other: JobMemory | None) -> JobMemory | None:
    """Combines two memory estimates: the parts of the larger one, the phases of both, and the engine with less room."""
    if one is None or other is None:
        return one or other
    names = one.phases.keys() | other.phases.keys()
    phases = {name: max(one.phases.get(name, 0), other.phases.get(name, 0)) for name in sorted(names)}
    engines = [memory.engine for memory in (one, other) if memory.engine]
    tightest = min(engines, key=lambda engine: engine.room, default=None)
    return JobMemory(max(one, other, key=lambda memory: memory.peak).parts, phases, tightest)


def _with_program(job: JobMemory, device: DeviceMemory, size: float) -> JobMemory:
    """Adds the program's own memory, which counts on a CPU."""
    if device.kind != "cpu":
        return job
    phases = {name: of + size for name, of in job.phases.items()}
    return replace(job, parts=job.parts | {"program": size}, phases=phases)


def host_bytes(
    a: Architecture, hardware: Hardware, examples: float = 0, rollout_tokens: float = 0, *, whole: bool = False
) -> float:
    """Host memory for the processes of a machine with GPUs. Each keeps an index of the SFT data, whose tokens stay in
    files. When the model is saved, it is whole in the first process; `whole`: each process loads the whole model."""
    weights = a.weights() * _BYTES[hardware.to_train().dtype]
    data = examples * SAMPLE_BYTES + rollout_tokens * ROLLOUT_TOKEN_BYTES
    return hardware.processes * (LIBRARIES + data) + weights * (hardware.processes if whole else 1)
