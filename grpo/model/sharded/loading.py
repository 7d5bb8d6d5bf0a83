"""Loading of policies for training: each of several processes reads only its shards from the files.

transformers reads the shard of a parameter that is a DTensor. So the model is sharded (FSDP2) on the meta device, after
it has its final form and before its weights are read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo.config.common import Hardware, Lora
from grpo.config.experts import Experts
from grpo.distributed.fsdp import Sharded, local, shard
from grpo.distributed.process_group import Parallel
from grpo.distributed.sequence_group import SequenceGroup, sharing_tokens
from grpo.errors import InputError
from grpo.model.lm_head import backbone_of
from grpo.model.loading import choose_device, decide_way, load_policy, prepare_training, with_adapters
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed
from grpo.model.packed.by_rows import runs_by_rows
from grpo.model.rope import rope_limit
from grpo.model.routers import mark_routers, prepare_routers
from grpo.model.sharded.first_blocks import FirstBlocks, on_meta
from grpo.model_folder import check_model_folder, hub_snapshot, load_checked, loading_options, stored_dtype

logger = logging.getLogger(__name__)

ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest mean difference of log-probabilities, nats, that is taken for rounding, by type of the arithmetic. With
bfloat16 a router may choose another expert."""


def load_sharded(
    model: str,
    hardware: Hardware,
    parallel: Parallel,
    *,
    dtype: torch.dtype | None = None,
    lora: Lora | None = None,
    experts: Experts | None = None,
    trained: bool = True,
) -> Sharded:
    """A policy sharded over the processes. All of them must call it. `dtype`: as for `grpo.distributed.fsdp.shard`.
    `experts`: how its routers are prepared; `marked_routers` returns them.

    A process never holds more than its shards and the first blocks of the model, which are probed whole. Exceptions,
    for which each process loads the whole model first: one process, a model that cannot be shortened.
    """
    sharded = _load_sharded(model, hardware, parallel, dtype, lora, experts if experts != Experts() else None, trained)
    if trained and parallel.sequence is not None:
        _check_can_share(backbone_of(sharded.model), model, parallel.sequence)
        if parallel.sequence.divides_layers:
            _check_divided(sharded, model, parallel.sequence)
    return sharded


def _load_sharded(
    model: str,
    hardware: Hardware,
    parallel: Parallel,
    dtype: torch.dtype | None,
    lora: Lora | None,
    experts: Experts | None,
    trained: bool,
) -> Sharded:
    random = torch.get_rng_state()  # reading shards draws numbers, not equally many in each process
    if parallel.world > 1 and (probed := _probed_blocks(model, hardware)) is not None:
        sharded = _read_shards(model, hardware, parallel, dtype, experts, trained and lora is None, *probed)
        if sharded is not None:
            if lora is not None:
                torch.set_rng_state(parallel.broadcast(random))
                sharded.add_adapters(lambda policy: with_adapters(policy, model, lora))
            return sharded
    policy = load_policy(model, hardware, lora)
    if experts is not None:
        prepare_routers(policy, model, experts)
    return shard(policy if trained else policy.requires_grad_(False), parallel, dtype=dtype)


def _check_can_share(backbone: Any, model: str, group: SequenceGroup) -> None:
    """Raises InputError if the processes of a group cannot share the tokens of a transformer's sequences."""
    setting, size = _setting_of(group), group.size
    if not is_packed(backbone):
        raise InputError(f"{setting}: {model} runs plain here, and only packed sequences can be shared; set it to 1")
    by_rows = sorted({type(module).__name__ for module in backbone.modules() if runs_by_rows(module)})
    if by_rows:
        raise InputError(f"{setting}: {', '.join(by_rows)} of {model} need whole sequences; set it to 1")
    if rope_limit(backbone) is not None:
        raise InputError(f"{setting}: the rotary embedding of {model} depends on the sequence's length; set it to 1")
    heads = backbone.config.get_text_config().num_attention_heads
    if heads % size:
        raise InputError(f"{setting}: {model} has {heads} attention heads, which must be a multiple of it")


def _check_divided(sharded: Sharded, model: str, group: SequenceGroup) -> None:
    """Raises InputError unless a model whose layers are divided computes what each process computes with them whole."""
    setting = _setting_of(group)
    if not any(isinstance(p, DTensor) and p.device_mesh.ndim > 1 for p in sharded.parameters()):
        raise InputError(
            f"{setting}: transformers has no plan to divide {model} among as many; take hardware.sequence_parallel"
        )
    vocabulary = sharded.model.config.get_text_config().vocab_size
    prompts = [[token % vocabulary for token in range(3, 3 + length)] for length in (2, 5)]
    completions = [[token % vocabulary for token in range(20, 20 + length)] for length in (7, 3)]
    with torch.no_grad():
        whole = sharded(completion_logprobs, prompts, completions, 1.0)
        with sharing_tokens(group):
            divided = sharded(completion_logprobs, prompts, completions, 1.0)
    difference = (whole - divided).abs().sum().item() / sum(map(len, completions))
    if not difference <= ROUNDING[sharded.dtype or next(sharded.parameters()).dtype]:
        raise InputError(
            f"{setting}: {model} computes other log-probabilities with its layers divided, by {difference:.2g}; take "
            "hardware.sequence_parallel"
        )


def _setting_of(group: SequenceGroup) -> str:
    return f"hardware.{'tensor' if group.divides_layers else 'sequence'}_parallel = {group.size}"


def load_to_copy(model: str, hardware: Hardware) -> Any:
    """A policy to be written, not run. The device only gets its first blocks, to check that the model runs there.

    If all weights are in bfloat16, or all in float32, they keep this type, whatever `hardware.dtype` is. So they are
    pages of their files, which the system can drop: a model of any size is copied with little memory. Weights of other
    types become float32, and the whole model is in memory.
    """
    hardware = hardware.model_copy(update={"dtype": stored_dtype(hub_snapshot(model))})
    if _probed_blocks(model, hardware) is None:
        return load_policy(model, hardware.model_copy(update={"device": "cpu"}))
    return _load(model, hardware)


def _probed_blocks(model: str, hardware: Hardware) -> tuple[FirstBlocks, Any] | None:
    """A model's first blocks and the model of them, which runs as the whole one should. None: they do not run without
    the others."""
    check_model_folder(model, hardware.remote_code)
    try:
        first = FirstBlocks.of(_described(model, hardware))
    except Exception:  # of an untrusted folder; loading the whole model says in one line what is wrong with it
        return None
    if first is None:
        return None
    with _without_report():
        short = _load(model, hardware, config=first.config, shortened=True).to(choose_device(hardware))
    try:
        decide_way(short, model, hardware)
    except InputError:
        return None
    return first, short


def _read_shards(
    model: str,
    hardware: Hardware,
    parallel: Parallel,
    dtype: torch.dtype | None,
    experts: Experts | None,
    trained: bool,
    first: FirstBlocks,
    short: Any,
) -> Sharded | None:
    """The sharded model; None if transformers cannot read shards of one of its weights, such as of one that it joins
    from several along the dimension that is divided."""
    routers = prepare_routers(short, model, experts) if experts is not None else []
    expected: dict[str, Tensor] = {}
    found: list[Sharded] = []

    def divide(whole: Any) -> None:
        whole.tie_weights()
        first.copy_way(short, whole)
        prepare_training(whole, model, hardware)
        whole.requires_grad_(trained)
        if experts is not None:
            mark_routers(whole, first.modules_like(whole, short, routers), experts)
        found.append(shard(whole, parallel, dtype=dtype))
        shards = dict(found[0].model.named_parameters())
        expected.update({name: _share(p, shards[name], parallel).clone() for name, p in short.named_parameters()})
        short.to("meta")  # its memory is needed for the shards

    problem = None
    try:
        with _before_reading(divide):
            _load(model, hardware)
    except InputError as error:  # raised again by reading it whole, if that is the folder's fault
        problem = str(error)
    weights = dict(found[0].model.named_parameters()) if found else {}
    differing = (name for name, share in expected.items() if not torch.equal(local(weights[name]).to(share), share))
    problem = problem or next((f"{name} differs" for name in differing), None)
    if problem := next(filter(None, parallel.all_gather(problem)), None):
        logger.warning("%s: each process loads it whole, because its shards cannot be read (%s)", model, problem)
        return None
    sharded = found[0]
    if parallel.device.type == "cpu":
        _copy_from_files(sharded)
    sharded.to(parallel.device)  # FSDP takes the weights as they are now
    sharded.share_buffers()
    return sharded


def _copy_from_files(sharded: Sharded) -> None:
    """Copies shards that are pages of mapped files, so that the files need not stay mapped."""
    for parameter in sharded.parameters():  # tied ones once
        share = local(parameter)
        if isinstance(parameter, DTensor) and share.untyped_storage().nbytes() > share.nbytes:
            parameter._local_tensor = share.detach().clone()


def _share(weight: Tensor, sharded: Tensor, parallel: Parallel) -> Tensor:
    """What this process has of a weight that is sharded like `sharded`."""
    weight, count, number = weight.detach(), parallel.world, parallel.rank
    if isinstance(sharded, DTensor) and sharded.device_mesh.ndim > 1:  # its layer is divided first
        count, number = sharded.device_mesh.size(0), sharded.device_mesh.get_local_rank(0)
        division: Any = sharded.placements[1]
        weight = weight.chunk(sharded.device_mesh.size(1), division.dim)[sharded.device_mesh.get_local_rank(1)]
    shares = weight.chunk(count)
    return shares[number] if number < len(shares) else weight[:0]


def _described(model: str, hardware: Hardware) -> Any:
    options = {"trust_remote_code": loading_options(hardware.remote_code)["trust_remote_code"]}
    config = AutoConfig.from_pretrained(model, **options)
    return on_meta(AutoModelForCausalLM, config, getattr(torch, hardware.dtype), **options)


def _load(model: str, hardware: Hardware, **options: Any) -> Any:
    dtype = getattr(torch, hardware.dtype)
    return load_checked(
        AutoModelForCausalLM, model, "language model", remote_code=hardware.remote_code, dtype=dtype, **options
    )


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Context in which transformers does not list the weights of a folder that a model does not use."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextlib.contextmanager
def _before_reading(change: Callable[[Any], None]) -> Iterator[None]:
    """Context in which transformers calls `change` with a model on the meta device before it reads its weights."""
    own = PreTrainedModel._load_pretrained_model

    def read(model: Any, *args: Any, **kwargs: Any) -> Any:
        change(model)
        return own(model, *args, **kwargs)

    PreTrainedModel._load_pretrained_model = staticmethod(read)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(own)  # type: ignore[method-assign]
