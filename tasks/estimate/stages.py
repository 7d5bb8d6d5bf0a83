"""Estimates of a stage before it runs: wall time, device-hours, memory, disk and network.

There is one function per kind of work. Nothing is measured here. Not counted: verifiers and judges, reading and
writing, process startup, and the devices of a server that samples for the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from grpo.config.common import Hardware, Sampling
from grpo.config.engines import VLLM, TextEngineSettings
from grpo.config.rl import RL
from grpo.config.supervised import Supervised
from grpo.rl.method_table import method_of, reads_reference, value_model
from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import ROWS_MAX, Assumed, Device, learn_s, read_s, sample_s
from tasks.estimate.engine import sampling_engine
from tasks.estimate.job_memory import (
    LIBRARIES,
    JobMemory,
    at_most,
    copying_memory,
    host_bytes,
    larger,
    rl_memory,
    sampling_memory,
    supervised_memory,
)
from tasks.estimate.memory import DeviceMemory, Draw, Lengths, draws, loads_whole, rollout_minibatches

USABLE = 0.9
"""Usable fraction of a GPU's memory. CUDA, NCCL and fragmentation take the rest."""
TRAFFIC = 8
"""Bytes that FSDP2 sends per weight and micro-batch: the weight in bfloat16 in the forward and again in the backward
pass, and its gradient once in float32 (docs/measured/sizes.md)."""
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Estimate:
    """Estimate for one stage. `seconds` is wall time. Sizes are in bytes; `memory`, `host` and `network` are per
    device."""

    devices: int = 1
    seconds: float = 0.0
    device_seconds: float = 0.0
    memory: JobMemory | None = None
    host: float = 0.0  # host memory per device; what a CPU computes with counts as `memory`
    disk: float = 0.0  # bytes kept after the stage
    scratch: float = 0.0  # additional bytes while the stage runs
    network: float = 0.0
    source: Literal["computed", "scaled", "measured"] = "computed"  # from settings alone, or an earlier build
    source_key: str | None = None  # key of the earlier build
    measured_peak: float | None = None  # peak memory of that build, bytes; takes precedence over `memory`

    @property
    def peak(self) -> float | None:
        """Peak memory per device, in bytes; None if the stage uses no model."""
        if self.memory is None:
            return None
        return self.memory.peak if self.measured_peak is None else self.measured_peak

    def __add__(self, after: Estimate) -> Estimate:
        """Estimate for both stages in sequence."""
        return Estimate(
            devices=max(self.devices, after.devices),
            seconds=self.seconds + after.seconds,
            device_seconds=self.device_seconds + after.device_seconds,
            memory=larger(self.memory, after.memory),
            host=max(self.host, after.host),
            disk=self.disk + after.disk,
            scratch=max(self.scratch, after.scratch),
            network=self.network + after.network,
        )

    def plain(self) -> dict[str, Any]:
        """JSON values, sizes in GB (1e9 bytes)."""
        values: dict[str, Any] = {"devices": self.devices, "seconds": round(self.seconds, 3)}
        values["device_hours"] = self.device_seconds / 3600
        if self.memory is not None:
            values["peak_memory_gb"] = (self.peak or 0.0) / 1e9
            values["peak_phase"] = self.memory.phase
            values["phases_gb"] = {name: size / 1e9 for name, size in self.memory.phases.items()}
            values["memory_gb"] = {name: size / 1e9 for name, size in self.memory.parts.items()}
        values["source"] = self.source
        if self.source_key is not None:
            values["source_key"] = self.source_key
        return values | {f"{name}_gb": getattr(self, name) / 1e9 for name in ("host", "disk", "scratch", "network")}


@dataclass(frozen=True)
class Estimator:
    """Estimates for one model on one kind of device."""

    a: Architecture
    device: Device
    assumed: Assumed = field(default_factory=Assumed)

    def supervised(
        self, settings: Supervised, tokens: float, length: float, models: int = 1, examples: float = 0
    ) -> Estimate:
        """Estimate for training `models` models one after another, each on `tokens` tokens in sequences of length
        `length` on average. `examples`: number of SFT sequences."""
        hardware = settings.hardware
        devices = _devices(hardware)
        batch = min(settings.micro_batch_tokens, settings.batch_size * length)
        recompute = hardware.gradient_checkpointing
        alone = learn_s(self.device, self.a, tokens, length, batch, _BYTES[hardware.dtype], recompute)
        traffic = self._traffic(tokens / batch / devices, devices)
        return Estimate(
            devices=devices,
            seconds=(seconds := models * max(alone / devices, traffic / self.device.network)),
            device_seconds=seconds * devices,
            memory=supervised_memory(self.a, at_most(settings, batch), self._device_memory),
            host=self._host(hardware, examples=examples, whole=loads_whole(settings)),
            disk=models * self._checkpoint(hardware),
            scratch=self._state(hardware, settings.optimizer.kind),
            network=models * traffic,
        )

    def sampled(
        self,
        prompts: float,
        group: int,
        sampling: Sampling,
        hardware: Hardware,
        engine: TextEngineSettings | None = None,
        policies: int = 1,
        reward_models: int = 0,
    ) -> Estimate:
        """Estimate for sampling `group` completions for each of `prompts` problems, with each of `policies` in turn. If
        a service samples, only disk and the reward models count."""
        engine = sampling_engine(engine, hardware)
        disk = policies * prompts * group * self._mean(sampling.max_new_tokens) * self.assumed.text_bytes
        away = engine is not None and not (isinstance(engine, VLLM) and engine.kind == "local")
        if away and not reward_models:
            return Estimate(disk=disk)
        assert engine is None or isinstance(engine, VLLM)  # whoever has reward models has no endpoint
        devices = _devices(hardware)
        if engine is not None and not away:  # each process starts a worker on each of its devices
            devices *= engine.tensor_parallel_size
        number, lengths = _BYTES[hardware.dtype], self._lengths(sampling.max_new_tokens)
        drawn = Draw(prompts, group, sampling, sampling.max_new_tokens)
        alone = 0.0 if away else self._sample(drawn, devices, number, engine)
        scored = prompts * group * (self.assumed.prompt_tokens + self._mean(sampling.max_new_tokens)) * reward_models
        alone += read_s(self.device, self.a, scored / _devices(hardware), sum(self._means(sampling)), 16384, number)
        held = sampling_memory(self.a, drawn, hardware, self._device_memory, lengths, engine, reward_models)
        # vLLM reads its shards from pages of the files.
        host = self._host(hardware, whole=True) if engine is None or reward_models else self._libraries
        return Estimate(devices, policies * alone, policies * alone * devices, held, host, disk)

    def rl(self, settings: RL, reward_models: int = 0) -> Estimate:
        """Estimate for all RL steps: sampling, forward passes of the reference, of the old policy and of a value model,
        reward models in the steps with general prompts, and the update. A rollout is sampled and measured once, for
        `minibatches` steps in each of `inner_epochs`."""
        hardware = settings.hardware
        settings = settings.model_copy(update={"engine": sampling_engine(settings.engine, hardware)})
        devices, number = _devices(hardware), _BYTES[hardware.dtype]
        rows = settings.prompts_per_step * settings.group_size
        away = settings.engine is not None and settings.engine.kind == "server"
        passes = reads_reference(settings) + _measures_old_policy(settings) + bool(value_model(settings))
        seconds = traffic = 0.0
        for steps, longest in _stretches(settings):
            length = self._whole(longest)
            tokens = steps * rows * length / devices
            batch = min(settings.micro_batch_tokens, rows * length / devices)
            rollouts = steps / (rollout_minibatches(settings, steps) * settings.inner_epochs)
            sampling = rollouts * self._sample(draws(settings, longest, steps)[0], devices, number, settings.engine)
            recompute = hardware.gradient_checkpointing
            measured = tokens / settings.inner_epochs
            learning = passes * read_s(self.device, self.a, measured, length, 4 * batch, number)
            learning += learn_s(self.device, self.a, tokens, length, batch, number, recompute) * (
                2 if value_model(settings) else 1
            )
            # A copy that samples on the trainer's own devices takes their time.
            seconds += max(sampling, learning) if settings.rollouts_ahead and away else sampling + learning
            traffic += self._traffic(tokens / batch, devices)
            if away:
                traffic += rollouts * self.a.weights() * number
        general = settings.general_last_steps / settings.inner_epochs * rows * settings.general_share / devices
        scored = general * self._whole(settings.sampling.max_new_tokens) * reward_models
        length = sum(self._means(settings.sampling))
        seconds += read_s(self.device, self.a, scored, length, settings.micro_batch_tokens, number)
        seconds += self._validations(settings)
        longest = max(longest for _, longest in _stretches(settings))
        most = rows / devices * (self.assumed.prompt_tokens + longest)
        taken = devices
        if devices == 1 and settings.engine is not None and settings.engine.kind == "local":
            taken = settings.engine.tensor_parallel_size  # one process starts a worker on each
        return Estimate(
            devices=taken,
            seconds=(seconds := max(seconds, traffic / self.device.network)),
            device_seconds=seconds * taken,
            memory=rl_memory(
                self.a, at_most(settings, most), self._device_memory, self._lengths(longest), reward_models
            ),
            host=self._host(
                hardware,
                rollout_tokens=rows * rollout_minibatches(settings, settings.steps) * self._whole(longest),
                whole=loads_whole(settings),
            ),
            disk=self._checkpoint(hardware),
            scratch=self._state(hardware, settings.optimizer.kind),
            network=traffic,
        )

    def copied(self, download: bool) -> Estimate:
        """Estimate for copying a base model, from the hub in bfloat16 or from a folder, at most in float32. The weights
        are pages of their files, if they have one of these types; only the first blocks are on a GPU."""
        of_gpu = self.device.kind != "cpu"
        held = copying_memory(4 * (self.a.first_blocks if of_gpu else self.a.weights()), self._device_memory)
        size = 2 * self.a.weights()
        return Estimate(
            memory=held,
            host=self._libraries,
            disk=size if download else 2 * size,
            network=size if download else 0,
        )

    @property
    def _device_memory(self) -> DeviceMemory:
        return DeviceMemory(self.device.kind, self.device.memory)

    @property
    def _libraries(self) -> float:
        return 0.0 if self.device.kind == "cpu" else LIBRARIES

    def _host(
        self, hardware: Hardware, examples: float = 0, rollout_tokens: float = 0, *, whole: bool = False
    ) -> float:
        if self.device.kind == "cpu":
            return 0.0
        return host_bytes(self.a, hardware, examples, rollout_tokens, whole=whole) / hardware.processes

    def _whole(self, longest: float) -> float:
        return self.assumed.prompt_tokens + self._mean(longest)

    def _mean(self, longest: float) -> float:
        return longest * self.assumed.completion_share

    def _means(self, sampling: Sampling) -> tuple[float, float]:
        return self.assumed.prompt_tokens, self._mean(sampling.max_new_tokens)

    def _lengths(self, longest: int) -> Lengths:
        return Lengths(round(self.assumed.prompt_tokens), longest)

    def _sample(self, draw: Draw, devices: int, number: int, engine: TextEngineSettings | None) -> float:
        """Seconds in which `devices` sample all that is drawn at once."""
        completions, mean, prompt = draw.prompts * draw.group, self._mean(draw.longest), self.assumed.prompt_tokens
        rows = max(draw.group, draw.sampling.batch_size) if engine is None else ROWS_MAX
        steps, with_engine = draw.longest if engine is None else mean, engine is not None
        return sample_s(self.device, self.a, completions / devices, prompt, steps, mean, rows, number, with_engine)

    def _validations(self, settings: RL) -> float:
        """Seconds of sampling in all validations, if each has the maximum number of problems."""
        if settings.validate_every is None:
            return 0.0
        _, validation = draws(settings, settings.sampling.max_new_tokens, settings.steps)
        devices, number = _devices(settings.hardware), _BYTES[settings.hardware.dtype]
        times = -(-settings.steps // settings.validate_every)
        return times * self._sample(validation, devices, number, settings.engine)

    def _traffic(self, micro_batches: float, devices: int) -> float:
        return micro_batches * TRAFFIC * self.a.weights() if devices > 1 else 0.0

    def _checkpoint(self, hardware: Hardware) -> float:
        return self.a.weights() * _BYTES[hardware.to_train().dtype]

    def _state(self, hardware: Hardware, optimizer: str) -> float:
        """Bytes of weights and moments in the two checkpoints that a job keeps."""
        weight = _BYTES[hardware.to_train().dtype]
        moment = weight if optimizer == "adamw" else 1
        return 2 * self.a.weights() * (weight + 2 * moment)


def _devices(hardware: Hardware) -> int:
    return hardware.processes * hardware.nodes


def _measures_old_policy(settings: RL) -> bool:
    """Whether the trainer computes log-probabilities of the old policy: if those of the sampler are not its own (vLLM,
    or weights that are one rollout old), and if several updates learn from them (`grpo.rl.collector`)."""
    inexact = settings.engine is not None or bool(settings.rollouts_ahead)
    return method_of(settings).online and inexact and settings.minibatches * settings.inner_epochs > 1


def _stretches(settings: RL) -> list[tuple[int, int]]:
    """(number of steps, max_new_tokens) between changes of max_new_tokens."""
    changes = sorted({0, *(start for start in settings.max_new_tokens_from if start < settings.steps)})
    ends = [*changes[1:], settings.steps]
    return [(end - start, settings.max_new_tokens(start)) for start, end in zip(changes, ends, strict=True)]
