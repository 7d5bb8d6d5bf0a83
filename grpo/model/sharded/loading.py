"""Loading of models by shards: each of several processes reads only its shards from the files.

transformers reads the shard of a parameter that is a DTensor. So the model is sharded (FSDP2) on the meta device, after
it has its final form and before its weights are read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo.config.common import Hardware, Lora
from grpo.config.experts import Experts
from grpo.dequantize import plain_weights
from grpo.distributed.fsdp import Sharded, local, shard
from grpo.distributed.process_group import Parallel
from grpo.distributed.sequence_group import SequenceGroup, sharing_tokens
from grpo.errors import InputError
from grpo.model.lm_head import backbone_of
from grpo.model.loading import POLICY, Kind, choose_device, decide_way, load_model, prepare_training, with_adapters
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed
from grpo.model.packed.by_rows import runs_by_rows
from grpo.model.rope import rope_limit
from grpo.model.routers import mark_adapted_routers, mark_routers, prepare_routers
from grpo.model.sharded.first_blocks import FirstBlocks, on_meta
from grpo.model_folder import check_model_folder, hub_snapshot, loading_options, stored_dtype

logger = logging.getLogger(__name__)

ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest mean difference of log-probabilities, nats, that is taken for rounding, by type of the arithmetic. With
bfloat16 a router may choose another expert."""


def load_sharded(
    model: str,
    hardware: Hardware,
    parallel: Parallel,
    *,
    kind: Kind = POLICY,
    dtype: torch.dtype | None = None,
    lora: Lora | None = None,
    experts: Experts | None = None,
    trained: bool = True,
    part: Callable[[Any], nn.Module] | None = None,
) -> Sharded:
    """A model sharded over the processes. All of them must call it. `dtype`: as for `grpo.distributed.fsdp.shard`.
    `experts`: how its routers are prepared; `marked_routers` returns them. `part`: makes the module that is kept, from
    the whole model.

    A process never holds more than its shards and the first blocks of the model, which are probed whole. Exceptions,
    for which each process loads the whole model first: one process, a model that cannot be shortened.
    """
    random = torch.get_rng_state()  # reading shards draws numbers, not equally many in each process
    experts = experts if experts != Experts() else None
    sharded = None
    if parallel.world > 1:
        sharded = _read_shards(model, hardware, parallel, kind, dtype, experts, trained and lora is None, part)
    if sharded is None:
        loaded = load_model(kind, model, hardware, lora)
        if experts is not None:
            prepare_routers(loaded, model, experts)
        kept = loaded if part is None else part(loaded)
        sharded = shard(kept if trained else kept.requires_grad_(False), parallel, dtype=dtype)
    elif lora is not None:
        torch.set_rng_state(parallel.broadcast(random))
        sharded.add_adapters(lambda policy: _adapted(policy, model, lora, experts))
    if trained and part is None and parallel.sequence is not None:
        _check_can_share(backbone_of(sharded.model), model, parallel.sequence)
        if parallel.sequence.divides_layers:
            _check_divided(sharded, model, parallel.sequence)
    return sharded


def _adapted(policy: Any, model: str, lora: Lora, experts: Experts | None) -> Any:
    adapted = with_adapters(policy, model, lora)
    if experts is not None:
        mark_adapted_routers(adapted, experts)
    return adapted


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
    counting = sorted({type(module).__name__ for module in backbone.modules() if hasattr(module, "range_calls")})
    if counting and group.divides_layers:  # a divided layer gets all tokens, and so other positions than it is given
        raise InputError(
            f"{setting}: {', '.join(counting)} of {model} count positions themselves; set it to 1, or take "
            "hardware.sequence_parallel"
        )
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
    if _probed_blocks(POLICY, model, hardware) is None:
        loaded = load_model(POLICY, model, hardware.model_copy(update={"device": "cpu"}))
    else:
        loaded = POLICY.load(model, hardware)
    if getattr(loaded, "is_quantized", False):
        raise InputError(
            f"{model}: its weights are quantized, and transformers makes no plain ones of them, which training needs; "
            "give the folder of the model without quantization"
        )
    return loaded


def _probed_blocks(kind: Kind, model: str, hardware: Hardware) -> tuple[FirstBlocks, Any] | None:
    """A model's first blocks and the model of them, which runs as the whole one should. None: they do not run without
    the others."""
    check_model_folder(model, hardware.remote_code)
    try:
        first = FirstBlocks.of(_described(kind, model, hardware))
    except Exception:  # of an untrusted folder; loading the whole model says in one line what is wrong with it
        return None
    if first is None:
        return None
    with _without_report():
        short = kind.load(model, hardware, config=first.config, shortened=True).to(choose_device(hardware))
    try:
        way = decide_way(short, model, hardware)
    except InputError:
        return None
    return None if way.writes else (first, short)  # later blocks may be written to in another way


def _read_shards(
    model: str,
    hardware: Hardware,
    parallel: Parallel,
    kind: Kind,
    dtype: torch.dtype | None,
    experts: Experts | None,
    trained: bool,
    part: Callable[[Any], nn.Module] | None,
) -> Sharded | None:
    """The sharded model; None if it cannot be shortened, or if transformers cannot read shards of one of its weights,
    such as of one that is quantized, or that it joins from several along the dimension that is divided."""
    if plain_weights(model) or (probed := _probed_blocks(kind, model, hardware)) is None:
        return None
    first, short = probed
    routers = prepare_routers(short, model, experts) if experts is not None else []
    expected: dict[str, Tensor] = {}
    shards: dict[str, nn.Parameter] = {}
    found: list[Sharded] = []

    def divide(whole: Any) -> None:
        whole.tie_weights()
        first.copy_way(short, whole)
        prepare_training(whole, model, hardware)
        whole.requires_grad_(trained)
        if experts is not None:
            mark_routers(whole, first.modules_like(whole, short, routers), experts)
        found.append(shard(whole if part is None else part(whole), parallel, dtype=dtype))
        for module in _not_kept(whole, found[0]):  # their weights are read as well
            fully_shard(module, mesh=parallel.mesh())
        divided = dict(whole.named_parameters())
        expected.update({name: _share(p, divided[name], parallel).clone() for name, p in short.named_parameters()})
        short.to("meta")  # its memory is needed for the shards

    problem = None
    try:
        with _before_reading(divide):
            whole = kind.load(model, hardware)
    except InputError as error:  # raised again by reading it whole, if that is the folder's fault
        problem = str(error)
    else:
        shards = dict(whole.named_parameters())
        for name in expected:
            if name.endswith(kind.new):  # each process drew its own, if the folder has none
                local(shards[name].detach()).copy_(expected[name])
    differing = (name for name, share in expected.items() if not torch.equal(local(shards[name]).to(share), share))
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


def _not_kept(whole: Any, kept: nn.Module) -> list[nn.Module]:
    """Modules of a model, inner ones first, with weights of their own that are not in the part that is kept."""
    mine = {id(parameter) for parameter in kept.parameters()} | {id(module) for module in kept.modules()}
    return [
        module
        for module in reversed([*whole.modules()])
        if id(module) not in mine and any(id(p) not in mine for p in module.parameters(recurse=False))
    ]


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


def _described(kind: Kind, model: str, hardware: Hardware) -> Any:
    options = {"trust_remote_code": loading_options(hardware.remote_code)["trust_remote_code"]}
    config = AutoConfig.from_pretrained(model, **options, **kind.of_config)
    return on_meta(kind.loader, config, getattr(torch, hardware.dtype), **options)


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
