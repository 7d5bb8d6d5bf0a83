"""Memory of a GRPO step on each device, computed from the model's architecture and the settings. Nothing is measured.

Counted are the tensors that this library keeps: weights, gradients and moments as torch.optim and FSDP2 hold them;
activations as autograd saves them for the backward pass of a transformers decoder with grouped-query attention and a
gated feed-forward block (counted as in Korthikanti et al., arXiv 2205.05198, section 4); the head as
`grpo.model.logprobs` computes it; and caches as in `grpo.model.decoder`. Not counted: the program and its libraries,
memory that an allocator keeps, and NCCL's buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.config.common import Hardware, Sampling
from grpo.config.rl import RL
from grpo.config.supervised import Pretrain, Supervised
from grpo.model.cpu.limits import INITIAL_CACHE_TOKENS, KEPT, KEPT_BYTES, MAX_ROWS, MIN_STEPS, chunk_bytes
from grpo.rl.method_table import keeps_reference, reads_reference, reference_hardware, value_model
from tasks.estimate.activations import activation_bytes, adapter_bytes, merged_experts
from tasks.estimate.architecture import Architecture
from tasks.estimate.engine import EngineMemory, engine_memory

CODES = 1 + 4 / 256
"""Bytes of an 8-bit moment: one for the code, plus a float32 scale per 256 codes (`grpo.training.optimizers`)."""
COPY = "sampler's copy"
"""Name of the weights that sample while the policy trains, whole in each process
(`grpo.generation.engines.CopiedWeights`)."""
Parts = dict[str, float]
"""Bytes by name."""


@dataclass(frozen=True)
class DeviceMemory:
    """The device of one process: its kind ("cuda" or "cpu") and its memory in bytes, of which a local vLLM takes a
    share."""

    kind: str = "cuda"
    bytes: float = 80e9


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a completion; the maximum if lengths differ."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class Draw:
    """What is sampled at once: `group` completions of up to `longest` tokens for each of `prompts` problems."""

    prompts: float
    group: int
    sampling: Sampling
    longest: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes on each device. `held` is present throughout a step; each of the others comes on top of it in one phase.
    `loading` happens before the first step: each device reads its shards of one model after the other, but probes the
    first blocks of each whole."""

    loading: float
    held: Parts
    sampling: Parts
    reference_pass: Parts
    update: Parts

    @property
    def phases(self) -> Parts:
        """Total of each phase in bytes."""
        held = sum(self.held.values())
        parts = {"sampling": self.sampling, "measuring": self.reference_pass, "update": self.update}
        return {"loading": self.loading} | {name: held + sum(of.values()) for name, of in parts.items()}

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def step_memory(a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths) -> StepMemory:
    """Memory of a GRPO step on each of the `processes` times `nodes` devices."""
    held, update = _held(a, settings), _update(a, settings, device, lengths)
    loading = _loading(a, settings, held)
    rollout, *validation = draws(settings, lengths.completion, settings.steps)
    if settings.rollouts_ahead and settings.engine is None:  # a copy samples beside the update
        held[COPY] = a.weights() * _itemsize(settings.hardware)
        loading = max(loading, held["weights"] + held["reference"] + held[COPY])
        update |= sampling_parts(a, settings, device, lengths, [rollout])
    return StepMemory(
        loading=loading,
        held=held,
        sampling=sampling_parts(a, settings, device, lengths, [rollout, *validation]),
        reference_pass=_reference_pass(a, settings, device),
        update=update,
    )


def draws(settings: RL, longest: int, steps: int) -> list[Draw]:
    """A rollout, which samples for several of the `steps` at once, and a validation with as many problems as it may
    have."""
    prompts = settings.prompts_per_step * rollout_minibatches(settings, steps)
    drawn = [Draw(prompts, settings.group_size, settings.sampling, longest)]
    if settings.validate_every is not None:
        of = settings.validation
        problems = of.problems * (1 + bool(settings.general_last_steps))  # of each domain
        most = of.sampling.max_new_tokens if of.sampling else longest
        drawn.append(Draw(problems, of.samples_per_problem, of.sampling or settings.sampling, most))
    return drawn


def rollout_minibatches(settings: RL, steps: int) -> int:
    """Minibatches that a rollout samples at once, if `steps` are left (`grpo.rl.trainer`)."""
    return min(settings.minibatches, -(-steps // settings.inner_epochs))


def devices(settings: RL) -> int:
    """Number of devices of a job."""
    return settings.hardware.processes * settings.hardware.nodes


def loads_whole(settings: Supervised | RL) -> bool:
    """Whether each process loads the whole model, instead of its shards."""
    return isinstance(settings, Pretrain) or settings.hardware.processes * settings.hardware.nodes == 1


def moment_bytes(settings: RL) -> float:
    """Bytes of one of AdamW's two moments, per trained weight."""
    return CODES if settings.optimizer.kind == "adamw_8bit" else _trained_itemsize(settings)


def _itemsize(hardware: Hardware) -> int:
    """Bytes per number in computations."""
    return {"float32": 4, "bfloat16": 2}[hardware.dtype]


def _trained_itemsize(settings: RL) -> int:
    return 4 if settings.lora else _itemsize(settings.hardware.to_train())


def _gathers(settings: RL) -> bool:
    """Whether weights are gathered, or cast to another type, before they are used in computations."""
    return devices(settings) > 1 or settings.hardware.mixed_precision


def _trained(a: Architecture, settings: RL) -> int:
    return a.weights() if settings.lora is None else a.adapter_weights(settings.lora.rank)


def _held(a: Architecture, settings: RL) -> Parts:
    hardware, trained = settings.hardware, _trained(a, settings)
    frozen = a.weights() if settings.lora else 0
    whole = {
        "weights": trained * _trained_itemsize(settings) + frozen * _itemsize(hardware.to_train()),
        "optimizer": 2 * trained * moment_bytes(settings),
        "reference": a.weights() * _itemsize(reference_hardware(settings)) if keeps_reference(settings) else 0,
    }
    return {name: size / devices(settings) for name, size in whole.items()}


def _loading(a: Architecture, settings: RL, held: Parts) -> float:
    trained, frozen = _itemsize(settings.hardware.to_train()), _itemsize(reference_hardware(settings))
    probed = a.weights() if loads_whole(settings) else a.first_blocks
    loading = max(probed * trained, held["weights"])
    if value_model(settings) == "model":
        loading = max(loading, held["weights"] + probed * trained)
    if held["reference"]:
        loading = max(loading, held["weights"] + max(probed * frozen, held["reference"]))
    return loading


def engine_of(a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths) -> EngineMemory | None:
    """Memory of vLLM in the process; None if it samples elsewhere, or if something else samples."""
    longest = lengths.prompt + max(draw.longest for draw in draws(settings, lengths.completion, settings.steps))
    return engine_memory(a, settings.engine, settings.hardware.dtype, device.bytes, longest)


def sampling_parts(
    a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths, drawn: Sequence[Draw]
) -> Parts:
    """What the sampler holds for the largest draw."""
    if settings.engine is not None:
        engine = engine_of(a, settings, device, lengths)
        return {"engine": engine.taken if engine else 0.0}
    each = [_drawing(a, settings, device, lengths.prompt, draw) for draw in drawn]
    return max(each, key=lambda parts: sum(parts.values()))


def _drawing(a: Architecture, settings: RL, device: DeviceMemory, prompt: int, draw: Draw) -> Parts:
    itemsize = _itemsize(settings.hardware)
    completions = -(-draw.prompts // devices(settings)) * draw.group
    rows = max(draw.group, min(draw.sampling.batch_size, completions))  # a group is never divided
    groups = -(-rows // draw.group)
    room = INITIAL_CACHE_TOKENS
    while room < draw.longest:
        room *= 2
    few = 1 < rows <= MAX_ROWS and draw.longest >= MIN_STEPS
    with_policy = not settings.rollouts_ahead  # else with a copy, which is whole and has no adapters of its own
    adapted = settings.lora is not None and with_policy
    packed = device.kind == "cpu" and itemsize == 4 and few and not adapted
    parts = {
        "whole model": a.weights() * itemsize if _gathers(settings) and with_policy else 0,
        "packed weights": a.weights() * itemsize if packed else 0,
        "cache": (groups * prompt + rows * room) * a.cache_numbers * itemsize,
        # In the model's type. On a CPU, plus three float32 copies: scaled by temperature, exponentials, sums.
        "logits": rows * a.vocabulary * (itemsize + (12 if device.kind == "cpu" else 0))
        + _wide_head(a, device, itemsize),
    }
    return parts | (_with_adapters(a, settings, 1) if adapted else {})


def _with_adapters(a: Architecture, settings: RL, blocks: float) -> Parts:
    """Weights of as many blocks' experts with their adapters, if they have any."""
    size = blocks * merged_experts(a, _itemsize(settings.hardware)) if settings.lora else 0
    return {"experts with adapters": size} if size else {}


def _reference_pass(a: Architecture, settings: RL, device: DeviceMemory) -> Parts:
    if not reads_reference(settings):
        return {}
    itemsize, tokens = _itemsize(settings.hardware), 4 * settings.micro_batch_tokens
    cast = settings.lora is not None or reference_hardware(settings) != settings.hardware
    copied = _gathers(settings) if cast else devices(settings) > 1
    return {
        # With LoRA the reference is the policy, which mixed precision copies in one process too, as a moving average.
        "gathered reference": measuring_weights(a) * itemsize if copied else 0,
        "a block's outputs": tokens * itemsize * (3 * a.hidden + 2 * _active_width(a)),
        "head": min(chunk_bytes(device.kind, device.bytes), 4 * tokens * a.vocabulary) * (1 if itemsize == 4 else 1.5)
        + _wide_head(a, device, itemsize),
    }


def measuring_weights(a: Architecture) -> int:
    """Number of weights that are gathered at once when a sharded model measures: two blocks and what is outside of
    blocks."""
    return a.outer_weights + 2 * a.largest_block


def _update(a: Architecture, settings: RL, device: DeviceMemory, lengths: Lengths) -> Parts:
    """Peak memory of an update: gradients of earlier micro-batches exist, the next micro-batch has finished its forward
    pass with all activations kept, and the backward pass is in the head or in the last block. A micro-batch holds at
    least one sequence."""
    hardware = settings.hardware
    longest = lengths.prompt + lengths.completion - 1
    tokens = max(settings.micro_batch_tokens, longest) / hardware.sharing
    itemsize = _itemsize(hardware)
    keys_per_token = (lengths.prompt + lengths.completion) / lengths.completion
    of_adapters = adapter_bytes(a, itemsize, settings.lora.rank) if settings.lora else 0
    block = (activation_bytes(a, itemsize, keys_per_token, device.kind) + of_adapters) * tokens
    between = tokens * a.hidden * itemsize
    if hardware.tensor_parallel > 1:  # attention and MLP get the others' tokens as well
        block += 2 * (hardware.tensor_parallel - 1) * between
    kept = a.layers * (between if hardware.gradient_checkpointing else block)
    recomputed = block if hardware.gradient_checkpointing else 0
    head = min(KEPT_BYTES[device.kind], 4 * tokens * a.vocabulary) + _chunk(a, device, itemsize, tokens) + between
    head += _wide_head(a, device, itemsize)
    sparse = 0 if a.experts is None else a.layers - a.experts.dense_layers
    merged = (min(1, sparse) if hardware.gradient_checkpointing else sparse) + 1 / 3  # and the gradient of one tensor
    return _with_adapters(a, settings, merged) | {
        "gradients": _trained(a, settings) * _trained_itemsize(settings) / devices(settings),
        "activations": kept + 2 * between,  # outputs of the last block, before and after the norm
        # Gradients of a block's activations: three as wide as the feed-forward block while its product is recomputed.
        "head or block": max(head, recomputed + 2 * between + 3 * tokens * itemsize * _active_width(a)),
        "gathered": _gathered(a, settings, itemsize) if _gathers(settings) else 0,
    }


def _chunk(a: Architecture, device: DeviceMemory, itemsize: int, tokens: float) -> float:
    """Bytes of a chunk of logits that is not kept for the backward pass: in float32, and in the type of the weights."""
    beyond = max(0, 4 * tokens * a.vocabulary - KEPT_BYTES[device.kind])
    return min(chunk_bytes(device.kind, device.bytes), beyond) * (1 if itemsize == 4 else 1.5)


def _wide_head(a: Architecture, device: DeviceMemory, itemsize: int) -> float:
    """Bytes of the float32 copy of a head of narrow weights (`grpo.model.packed.products`)."""
    weights = a.vocabulary * a.hidden
    return 4 * weights if device.kind == "cpu" and itemsize == 2 and weights <= KEPT else 0


def _gathered(a: Architecture, settings: RL, itemsize: int) -> float:
    """Bytes that FSDP2 gathers: the outer weights for a whole pass, and two blocks at a time, the current one and the
    next. Gradients are unsharded, in float32, until they are reduced over processes."""
    block = a.gathered_block(settings.hardware.tensor_parallel)
    weights = itemsize * (a.outer_weights + 2 * block)
    if settings.lora:
        return weights
    return weights + itemsize * (a.outer_weights + block) + 4 * block


def _active_width(a: Architecture) -> int:
    """Total width of the feed-forward blocks that a token passes through."""
    if a.experts is None:
        return a.feed_forward
    return (a.experts.active + a.experts.shared) * a.experts.width
