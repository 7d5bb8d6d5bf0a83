"""Memory of whole jobs on each device: RL with its reward and value models, supervised training, sampling.

All of them follow the memory model of a GRPO step: SFT, pretraining and reward models are an update without a rollout,
sampling is a rollout without an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.config.supervised import Supervised
from grpo.data.token_shards import SAMPLE_BYTES
from grpo.rl.method_table import value_model
from tasks.estimate.architecture import Architecture
from tasks.estimate.memory import DeviceMemory, Lengths, Parts, devices, moment_bytes, step_memory

_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 2e9
"""Bytes of a process for Python, torch, CUDA and its other libraries. Assumed."""
CPU_TRAINING, CPU_SAMPLING = 0.4e9, 0.5e9
"""Bytes that a trainer on a processor holds beyond the tensors that are counted: data and tokenizer in Python, compiled
kernels, what the allocator keeps, PyTorch's buffers for each thread. Upper bounds of what `benchmarks/estimates.py`
measures with `tiny`; CUDA's count begins after them."""
ROLLOUT_TOKEN_BYTES = 60
"""Of a token in a rollout: a Python integer, and log-probabilities and advantages in float32. Each process is counted
with the whole rollout."""


@dataclass(frozen=True)
class JobMemory:
    """Bytes on each device: `parts` by what they hold, `phases` in total."""

    parts: Parts
    phases: Parts

    @property
    def phase(self) -> str:
        """The phase with the highest total."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> float:
        return self.phases[self.phase]


def rl_memory(
    a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths, reward_models: int = 0
) -> JobMemory:
    """Memory of reinforcement learning. Each reward model is as large as the policy; a value model has gradients and
    moments of its own."""
    step = step_memory(a, settings, device, lengths)
    more: Parts = {}
    if reward_models:
        more["reward models"] = reward_models * a.weights() * _BYTES[settings.hardware.dtype]
    if value_model(settings) == "model":
        trained = a.weights() * _BYTES[settings.hardware.to_train().dtype]
        more["value model"] = (2 * trained + 2 * a.weights() * moment_bytes(settings)) / devices(settings)
    return _with_program(
        JobMemory(
            step.held | step.sampling | step.reference_pass | step.update | more,
            {name: size + sum(more.values()) for name, size in step.phases.items()},
        ),
        device,
        CPU_SAMPLING,
    )


def supervised_memory(a: Architecture, settings: Supervised, device: DeviceMemory) -> JobMemory:
    """Memory of an update of all weights, or of adapters, on micro-batches of separate sequences."""
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
    step = step_memory(a, as_rl, device, Lengths(0, 1))
    phases = {name: step.phases[name] for name in ("loading", "update")}
    return _with_program(JobMemory(step.held | step.update, phases), device, CPU_TRAINING)


def sampling_memory(
    a: Architecture,
    sampling: Sampling,
    hardware: Hardware,
    device: DeviceMemory,
    lengths: Lengths,
    prompts: int,
    group: int,
    engine: VLLM | None = None,
    reward_models: int = 0,
) -> JobMemory:
    """Memory of sampling `group` completions for each of `prompts` problems, with a whole model in each process."""
    as_rl = RL(
        steps=1,
        kl_coef=0.0,
        prompts_per_step=max(1, prompts),
        group_size=max(2, group),
        sampling=sampling,
        engine=engine,
        optimizer={"learning_rate": 0.1},  # nothing is trained
        hardware=hardware,
    )
    sampled = step_memory(a, as_rl, device, lengths).sampling
    whole = a.weights() * _BYTES[hardware.dtype]
    parts = {name: size for name, size in sampled.items() if name != "whole model"}
    if engine is None:
        parts["weights"] = whole
    if reward_models:
        parts["reward models"] = reward_models * whole
    return _with_program(JobMemory(parts, {"sampling": sum(parts.values())}), device, CPU_SAMPLING)


def _with_program(job: JobMemory, device: DeviceMemory, size: float) -> JobMemory:
    """The same with the program's own memory, which counts on a processor."""
    if device.kind != "cpu":
        return job
    return JobMemory(job.parts | {"program": size}, {name: of + size for name, of in job.phases.items()})


def host_bytes(a: Architecture, hardware: Hardware, examples: float = 0, rollout_tokens: float = 0) -> float:
    """Memory of a machine's processor, beside GPUs, for the processes on it: each loads the whole model before it is
    divided, and keeps an index of the SFT data, whose tokens stay in files. Saving needs less than loading."""
    weights = a.weights() * _BYTES[hardware.to_train().dtype]
    data = examples * SAMPLE_BYTES + rollout_tokens * ROLLOUT_TOKEN_BYTES
    return hardware.processes * (LIBRARIES + weights + data)
