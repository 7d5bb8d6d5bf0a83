"""Models whose weights, gradients and optimizer state are spread over the processes of a job (FSDP2).

With one process the same code runs on the model as it is, and nothing is gathered or copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo.config.common import Hardware
from grpo.distributed.process_group import Parallel

T = TypeVar("T")


class Sharded(nn.Module):
    """All that reads the model's weights runs inside its forward: `sharded(function, *args)` is function(model, *args).

    All processes call it equally often, for each call gathers weights from all of them. One that has less to learn
    from calls it with a short sequence and multiplies the loss by 0. Between calls `parameters()` are this process's
    shares: what an optimizer takes.
    """

    def __init__(self, model: Any, parallel: Parallel):
        """Use `shard`."""
        super().__init__()
        self.model, self.parallel = model, parallel
        self.dtype: torch.dtype | None = None
        self.hold = False
        self._empty: list[Any] = []  # a list, so that what is in it is no submodule

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        # What inference mode gathers could not be used again with gradients.
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            result: T = super().__call__(function, *args)
        if not gradients and self._empty:
            self._let_go()  # else the backward pass does it
        return result

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(self.model, *args)

    def sync(self, last: bool) -> None:
        """To be told before each backward pass whether it is the step's last. Only a model that is held listens."""
        if self.hold:
            assert isinstance(self, FSDPModule)
            self.set_requires_gradient_sync(last)
            self.set_reshard_after_backward(last)

    @contextlib.contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with all of its weights in each process, for sampling and measuring: without gradients, but called
        as often as each likes. All processes enter it together."""
        if not self._empty:
            yield self.model
            return
        model = self._empty[0]
        try:
            _set_weights(model, self.model, lambda p: _full(p, self.dtype))
            yield model
        finally:
            _set_weights(model, model, lambda p: p.to("meta"))

    @torch.inference_mode(False)
    @torch.no_grad()
    def full_tensors(self, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The weights by their names in transformers' files, one at a time, with adapters merged into them, or without.

        In each process; all of them go through it together, to the end.
        """
        base = _base(self.model)
        for name, parameter in base.named_parameters():
            owner, _, leaf = name.rpartition(".")
            if ".lora_" in owner:
                continue
            tensor = _full(parameter)
            if owner.endswith(".base_layer"):
                owner = owner.removesuffix(".base_layer")
                layer: Any = base.get_submodule(owner)
                for adapter in layer.active_adapters if adapters and leaf == "weight" else ():
                    tensor = tensor + _full(layer.get_delta_weight(adapter)).to(tensor.dtype)
            yield f"{owner}.{leaf}", tensor

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' Auto classes open, adapters merged. All processes call it."""
        tensors = {name: tensor.cpu() for name, tensor in self.full_tensors() if self.parallel.main}
        if self.parallel.main:
            _base(self.model).save_pretrained(folder, state_dict=tensors)
        self.parallel.barrier()

    def _let_go(self) -> None:
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def arithmetic(hardware: Hardware) -> torch.dtype | None:
    """What `shard` is told of a model that is trained: its own type, or under mixed precision another one."""
    return getattr(torch, hardware.dtype) if hardware.mixed_precision else None


def shard(model: Any, parallel: Parallel, *, dtype: torch.dtype | None = None, hold: bool = False) -> Sharded:
    """Spread `model` over the processes; it must be the same in all of them. Make the optimizer afterwards.

    Gradients are sums over the processes, not means, and are added in float32 or better. `dtype` is that of the
    arithmetic where it is not that of the weights: with bfloat16 over float32 weights a small learning rate still moves
    them (one process does this too). `hold`: weights stay gathered and gradients unreduced through the micro-batches of
    a step, which is faster where messages are slow, and takes the memory of a whole model and its gradients in each
    process.
    """
    sharded = Sharded(model.to(parallel.device), parallel)
    own = next(model.parameters()).dtype
    if parallel.world == 1 and dtype in (None, own):
        return sharded
    sharded.dtype, sharded.hold, sharded._empty = dtype, hold, [_without_weights(model)]
    mesh = parallel.mesh()
    adding = torch.promote_types(dtype or own, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=adding, cast_forward_inputs=False)
    for part in [*_parts(model), sharded]:
        fsdp = fully_shard(part, mesh=mesh, mp_policy=policy)
        fsdp.set_gradient_divide_factor(1.0)
        fsdp.set_force_sum_reduction_for_comms(True)  # a factor alone is an operation that gloo lacks
        if hold:
            fsdp.set_reshard_after_forward(False, recurse=False)
    return sharded


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients so that the norm of all of them, in all processes, is `max_norm` at most. Returns the norm, the
    same in each process, as it was."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = _full(norm)
    if (found := norm.item()) > max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return found


def local(tensor: Tensor) -> Tensor:
    """This process's share; all of it where nothing is divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parts(model: nn.Module) -> list[nn.Module]:
    """What is gathered by itself, inner modules first: transformer blocks, and modules whose trained weights have
    another type than the rest, since gradients of one type travel together. What is left goes with the root."""
    blocks = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    usual = next((p.dtype for p in model.parameters() if p.requires_grad), None)

    def is_part(module: nn.Module) -> bool:
        own = module.parameters(recurse=False)
        return type(module).__name__ in blocks or any(p.requires_grad and p.dtype != usual for p in own)

    return [module for module in reversed([*model.modules()]) if is_part(module)]


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _without_weights(model: Any) -> Any:
    """A copy that shares nothing and has room for weights; tied ones stay tied."""
    hollow = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, hollow).eval()


@torch.inference_mode(False)
@torch.no_grad()
def _set_weights(model: nn.Module, source: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Give `model` the changed weights of `source`, which has the same names; tied ones are changed once."""
    changed: dict[Tensor, nn.Parameter] = {}
    for name, weight in [*source.named_parameters(remove_duplicate=False)]:
        if weight not in changed:
            changed[weight] = nn.Parameter(change(weight), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, changed[weight])


def _full(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None:
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
