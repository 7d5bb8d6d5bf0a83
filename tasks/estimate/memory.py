"""How many bytes a training step holds on each device, from the shape of a model and the settings; nothing is measured.

Every number counts tensors that this library keeps: weights, gradients and moments as torch.optim and FSDP2 hold them,
activations as autograd saves them for the backward pass of a transformers decoder with grouped attention and a gated
feed-forward block (the way of counting is that of Korthikanti et al., arXiv 2205.05198, section 4), the head as
`grpo.model.packed.logprobs` computes it, caches as `grpo.generation.decoder` does. What is not counted: the program
itself and its libraries, what an allocator keeps, buffers of NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo.config.common import Hardware
from grpo.config.rl import RL
from tasks.estimate.architecture import Architecture

CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 2**28}
KEPT_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""As in grpo.model.packed.logprobs, which needs torch: logits of a chunk, and probabilities kept for the backward
pass."""
CODES = 1 + 4 / 256
"""Bytes of a moment in 8 bits: a code, and a scale for each 256 (`grpo.training.adamw_8bit`)."""
FEW_ROWS = 48
FEW_ROWS_PAY_FROM = 128
"""As in grpo.model.cpu.prepacked_linear: sequences up to which, and steps from which, it packs weights."""
ROOM = 64
"""Tokens of a sampler's first cache; it doubles from there (`grpo.generation.decoder`)."""
Parts = dict[str, float]


@dataclass(frozen=True)
class Place:
    """A device as a process has one to itself: its kind ("cuda" or "cpu") and, for a local vLLM's share, its size."""

    kind: str = "cuda"
    bytes: float = 80e9


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a completion; the longest where they differ."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class Memory:
    """Bytes on each device: what stays through a step, and what comes on top in each of its phases. Loading is before
    all that: models arrive whole on each device, one after the other, and are divided there."""

    loading: float
    held: Parts
    sampling: Parts
    measuring: Parts
    update: Parts

    @property
    def phases(self) -> Parts:
        """The whole of each phase."""
        held = sum(self.held.values())
        parts = {"sampling": self.sampling, "measuring": self.measuring, "update": self.update}
        return {"loading": self.loading} | {name: held + sum(of.values()) for name, of in parts.items()}

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def memory(a: Architecture, settings: RL, place: Place, lengths: Lengths) -> Memory:
    """Of a GRPO step with these settings, on each of `processes` times `nodes` devices."""
    held = _held(a, settings)
    return Memory(
        loading=_loading(a, settings, held),
        held=held,
        sampling=_sampling(a, settings, place, lengths),
        measuring=_measuring(a, settings, place),
        update=_update(a, settings, place, lengths),
    )


def devices(settings: RL) -> int:
    return settings.hardware.processes * settings.hardware.nodes


def moment_bytes(settings: RL) -> float:
    """Of one of AdamW's two moments, for each weight that is trained."""
    kinds: dict[str, float] = {"adamw": _number_trained(settings), "adamw_8bit": CODES}
    return kinds[settings.optimizer.kind]


def activation_bytes(a: Architecture, number: int, keys_per_token: float = 1.0) -> float:
    """What autograd keeps of a token in one block, with numbers of 4 or 2 bytes.

    `keys_per_token`: keys that attention gathers for each token, more than 1 where sequences share a prompt.
    """
    return _norms(a, number) + _attention(a, number, keys_per_token) + _feed_forward(a, number)


def _norms(a: Architecture, number: int) -> float:
    # Each of two: its input, its output and a scale (`grpo.model.fused.layers`).
    return 2 * (2 * number * a.hidden + 4)


def _attention(a: Architecture, number: int, keys_per_token: float) -> float:
    # Queries, outputs, and outputs once more in the order of the tokens; keys and values, and once more behind their
    # prompts where these are shared; a sum for each head.
    shares = keys_per_token + (keys_per_token > 1)
    if latent := a.latent:
        key = latent.plain + latent.rotary
        wide = a.heads * (key + 2 * latent.value + shares * (key + latent.value))
        narrow = 3 * latent.query_rank + 3 * latent.key_rank
        return number * (wide + narrow) + 4 * a.heads
    return number * a.head_width * (3 * a.heads + 2 * shares * a.key_heads) + 4 * a.heads


def _feed_forward(a: Architecture, number: int) -> float:
    # Gate and up (`grpo.model.fused.layers`). An expert keeps silu(gate) and the product too, and has inputs and
    # outputs of its own.
    if a.experts is None:
        return number * 2 * a.feed_forward
    passed = a.experts.active + a.experts.shared
    return number * (passed * 4 * a.experts.width + 2 * a.experts.active * a.hidden)


def _adapters(a: Architecture, settings: RL, number: int) -> float:
    # peft keeps adapters in float32, and so a copy of every input that has another type; their narrow products; and
    # what goes into the last linear layer, which is made again where that has no adapter.
    if settings.lora is None:
        return 0
    copies = sum(inputs for inputs, _ in a.linears) if number == 2 else 0
    return 4 * (copies + settings.lora.rank * len(a.linears)) + number * a.feed_forward


def _number(hardware: Hardware) -> int:
    """Bytes."""
    return {"float32": 4, "bfloat16": 2}[hardware.dtype]


def _number_trained(settings: RL) -> int:
    return 4 if settings.lora else _number(settings.hardware.to_train())


def _gathers(settings: RL) -> bool:
    """Whether weights are brought together, or into another type, before they compute."""
    return devices(settings) > 1 or settings.hardware.mixed_precision


def _trained(a: Architecture, settings: RL) -> int:
    return a.weights() if settings.lora is None else a.adapter_weights(settings.lora.rank)


def _held(a: Architecture, settings: RL) -> Parts:
    hardware, trained = settings.hardware, _trained(a, settings)
    frozen = a.weights() if settings.lora else 0
    whole = {
        "weights": trained * _number_trained(settings) + frozen * _number(hardware.to_train()),
        "optimizer": 2 * trained * moment_bytes(settings),
        "reference": a.weights() * _number(hardware) if settings.kl_coef and settings.lora is None else 0,
    }
    return {name: size / devices(settings) for name, size in whole.items()}


def _loading(a: Architecture, settings: RL, held: Parts) -> float:
    policy = a.weights() * _number(settings.hardware.to_train())
    reference = a.weights() * _number(settings.hardware) if held["reference"] else 0
    return max(policy, held["weights"] + reference)


def _sampling(a: Architecture, settings: RL, place: Place, lengths: Lengths) -> Parts:
    if settings.engine is not None:
        share = settings.engine.gpu_memory_utilization if settings.engine.kind == "local" else 0.0
        return {"engine": share * place.bytes}
    number = _number(settings.hardware)
    rows = min(settings.sampling.batch_size, -(-settings.prompts_per_step // devices(settings)) * settings.group_size)
    groups = -(-rows // settings.group_size)
    room = ROOM
    while room < lengths.completion:
        room *= 2
    few = 1 < rows <= FEW_ROWS and lengths.completion >= FEW_ROWS_PAY_FROM
    packed = place.kind == "cpu" and number == 4 and few and settings.lora is None
    return {
        "whole model": a.weights() * number if _gathers(settings) else 0,
        "packed weights": a.weights() * number if packed else 0,
        "cache": (groups * lengths.prompt + rows * room) * a.cache_numbers * number,
        # The model's, and on the processor in float32: with a temperature, exponentials, and one for sums.
        "logits": rows * a.vocabulary * (number + (12 if place.kind == "cpu" else 0)),
    }


def _measuring(a: Architecture, settings: RL, place: Place) -> Parts:
    if not settings.kl_coef:
        return {}
    number, tokens = _number(settings.hardware), 4 * settings.micro_batch_tokens
    # LoRA's reference is the policy itself, adapters off.
    gathered = _gathers(settings) if settings.lora else devices(settings) > 1
    return {
        "whole reference": a.weights() * number if gathered else 0,
        "a block's outputs": tokens * number * (3 * a.hidden + 2 * _width(a)),
        "head": min(CHUNK_BYTES[place.kind], 4 * tokens * a.vocabulary) * (1 if number == 4 else 1.5),
    }


def _update(a: Architecture, settings: RL, place: Place, lengths: Lengths) -> Parts:
    """At its largest a step has gradients of earlier micro-batches and is between the passes of another: all that the
    forward pass kept is there, and the head or the last block is being passed backwards."""
    hardware, tokens = settings.hardware, settings.micro_batch_tokens
    number = _number(hardware)
    keys_per_token = (lengths.prompt + lengths.completion) / lengths.completion
    of_block = (activation_bytes(a, number, keys_per_token) + _adapters(a, settings, number)) * tokens
    between = tokens * a.hidden * number
    kept = a.layers * (between if hardware.gradient_checkpointing else of_block)
    again = of_block if hardware.gradient_checkpointing else 0
    head = min(KEPT_BYTES[place.kind], 4 * tokens * a.vocabulary) + _chunk(a, place, number, tokens) + between
    return {
        "gradients": _trained(a, settings) * _number_trained(settings) / devices(settings),
        "activations": kept + 2 * between,  # after the last block: its output, normed and before completion tokens
        # Gradients of a block's activations: three as wide as the feed-forward block, while its product is made again.
        "head or block": max(head, again + 2 * between + 3 * tokens * number * _width(a)),
        "gathered": _gathered(a, settings, number) if _gathers(settings) else 0,
    }


def _chunk(a: Architecture, place: Place, number: int, tokens: int) -> float:
    """Logits that are not kept as probabilities: in float32, and in the type of the weights."""
    beyond = max(0, 4 * tokens * a.vocabulary - KEPT_BYTES[place.kind])
    return min(CHUNK_BYTES[place.kind], beyond) * (1 if number == 4 else 1.5)


def _gathered(a: Architecture, settings: RL, number: int) -> float:
    """FSDP2: outer weights stay together through a pass, blocks two at a time, one computing and the next. Gradients
    are whole until they are summed over processes, in float32."""
    weights = number * (a.outer_weights + 2 * a.largest_block)
    if settings.lora:
        return weights
    return weights + number * (a.outer_weights + a.largest_block) + 4 * a.largest_block


def _width(a: Architecture) -> int:
    """Of the feed-forward blocks that a token passes."""
    if a.experts is None:
        return a.feed_forward
    return (a.experts.active + a.experts.shared) * a.experts.width
