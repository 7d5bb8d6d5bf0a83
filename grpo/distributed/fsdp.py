"""Models sharded over the processes of a job (FSDP2): weights, gradients and optimizer state.

With one process the same code runs on the unsharded model without gathering or copying.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo.config.common import Hardware
from grpo.distributed.divided_layers import divide_layers, parts_within
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError

T = TypeVar("T")
_SERIAL, _ROW = 2**15, 2**10
"""Number of elements that torch reduces in one thread, and the row length into which longer tensors are split."""


class Sharded(nn.Module):
    """`sharded(function, *args)` is function(model, *args), with the weights gathered for the call.

    All processes must call it equally often, because each call gathers weights from all of them. A process with fewer
    micro-batches calls it with a short sequence and multiplies the loss by 0. Between calls `parameters()` returns this
    process's shards, for the optimizer.
    """

    def __init__(self, model: Any, parallel: Parallel):
        """Use `shard` to create it."""
        super().__init__()
        self.model, self.parallel = model, parallel
        self.dtype: torch.dtype | None = None
        self._divide: Callable[[Any], None] = lambda _: None
        self._empty: list[Any] = []  # a list keeps the copy from being registered as a submodule

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        # Weights gathered in inference mode could not be used later with gradients.
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            result: T = super().__call__(function, *args)
        if not gradients and self._empty:
            self._reshard()  # otherwise the backward pass does it
        return result

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(self.model, *args)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """Context that yields the model with all its weights in each process, without gradients, for sampling and
        log-probabilities. All processes must enter together; inside, each may call the model as often as it needs."""
        if not self._empty:
            yield self.model
            return
        model = self._empty[0]
        try:
            _set_weights(model, self.model, lambda p: _full(p, self.dtype))
            yield model
        finally:
            _set_weights(model, model, lambda p: p.to("meta"))

    def add_adapters(self, add: Callable[[Any], Any]) -> None:
        """Adds adapters to the sharded model, and shards them. `add` must draw the same numbers in all processes."""
        before = [*self.model.modules()]
        self.model = add(self.model)
        self._empty = [add(model).eval() for model in self._empty]
        new = [m for m in self.model.modules() if m not in {*before} and [*m.parameters(recurse=False)]]
        for part in before:
            if isinstance(part, FSDPModule) and (inside := parts_within(new, part)):
                self._divide(inside)
                new = [module for module in new if module not in inside]
        if new:
            self._divide(new)

    @torch.inference_mode(False)
    @torch.no_grad()
    def full_tensors(self, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The full weights and stored buffers by their names in the model, one at a time, with or without adapters
        merged.

        All processes must iterate together, to the end.
        """
        base = _base(self.model)
        for name, parameter in stored_tensors(base):
            owner, _, leaf = name.rpartition(".")
            if ".lora_" in owner:
                continue
            tensor = _full(parameter)
            while owner.endswith(".base_layer"):  # experts have an adapter around another, one for each tensor
                owner = owner.removesuffix(".base_layer")
                layer: Any = base.get_submodule(owner)
                adapted = leaf == getattr(layer, "parameter_name", "weight")
                for adapter in layer.active_adapters if adapters and adapted else ():
                    tensor = tensor + _full(layer.get_delta_weight(adapter)).to(tensor.dtype)
            yield f"{owner}.{leaf}", tensor

    def file_tensors(self, *, adapters: bool = True) -> Iterator[tuple[str, Tensor]]:
        """`full_tensors` as a model's files hold them: some have experts one by one, which transformers joins.

        All processes must iterate together, to the end. Raises InputError if one tensor of the files is several of the
        model.
        """
        from transformers.core_model_loading import revert_weight_conversion

        base, sent = _base(self.model), set[str]()
        for name, tensor in self.full_tensors(adapters=adapters):
            for filed, part in revert_weight_conversion(base, {name: tensor}).items():
                if filed in sent:
                    raise InputError(
                        f"{type(base).__name__}: {filed} of its files is divided among several weights here, so it "
                        "cannot be sent to vLLM; take another engine"
                    )
                sent.add(filed)
                yield filed, part

    def save(self, folder: Path) -> None:
        """Writes a folder that transformers' Auto classes can load, with adapters merged. All processes must call
        it."""
        tensors = {name: tensor.cpu() for name, tensor in self.full_tensors() if self.parallel.is_main}
        if self.parallel.is_main:
            _base(self.model).save_pretrained(folder, state_dict=tensors)
        self.parallel.barrier()

    def share_buffers(self) -> None:
        """Gives the copy that `gathered` fills the model's buffers. For a model that was sharded before it had any."""
        for copied in self._empty:
            for name, buffer in self.model.named_buffers():
                owner, _, leaf = name.rpartition(".")
                setattr(copied.get_submodule(owner), leaf, buffer)

    def _reshard(self) -> None:
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model, tied ones once, and the buffers that its files hold, by name: DeepSeek-V3 keeps the bias
    by which a router balances its experts in one."""
    weights = dict(model.named_parameters())
    yield from weights.items()
    known = {id(weight) for weight in weights.values()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in known:
            yield name, tensor


def compute_dtype(hardware: Hardware) -> torch.dtype | None:
    """Arithmetic dtype of a trained model under mixed precision; None: the dtype of its weights."""
    return getattr(torch, hardware.dtype) if hardware.mixed_precision else None


def shard(model: Any, parallel: Parallel, *, dtype: torch.dtype | None = None) -> Sharded:
    """Shards `model` over the processes. It must be the same in all of them; create the optimizer afterwards.

    Gradients are sums over the processes, not means, reduced in float32 or better. `dtype`: dtype of the arithmetic, if
    different from the weights'. With bfloat16 arithmetic and float32 weights, small learning rates still have an
    effect. The model may be on the meta device, and its shards be read afterwards.

    Raises InputError if FSDP cannot divide the model.
    """
    weight, sequence = next(model.parameters()), parallel.sequence
    sharded = Sharded(model if weight.is_meta else model.to(parallel.device), parallel)
    own = weight.dtype
    if parallel.world == 1 and dtype in (None, own):
        return sharded
    if shares_weights(model):
        raise InputError(
            f"{type(model).__name__} uses weights in several of its blocks, or in a block and outside of them, which "
            "FSDP cannot divide; set hardware.processes and hardware.nodes to 1, and mixed_precision to false"
        )
    sharded.dtype, sharded._empty = dtype, [_without_weights(model)]
    adding = torch.promote_types(dtype or own, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=adding, cast_forward_inputs=False)

    everyone = parallel.mesh()

    def divide(part: Any, mesh: DeviceMesh = everyone) -> None:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        for fsdp in part if isinstance(part, list) else [part]:
            fsdp.set_gradient_divide_factor(1.0)
            fsdp.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction with a factor

    parts = _gathered_parts(model)
    if sequence is not None and sequence.divides_layers:
        copies = parallel.mesh_of_groups()
        divided = divide_layers(model, copies["layers"])
        for part in parts:
            if inside := parts_within(divided, part):
                divide(inside, copies["copies"])
    for part in [*parts, sharded]:
        divide(part)
    sharded._divide = divide
    return sharded


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scales the gradients of all processes to a total norm of at most `max_norm`. Returns the norm before scaling, the
    same in each process: 0 where nothing has a gradient, as in a step whose groups are all without reward variance."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}  # divided layers have one of their own
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    if not by_mesh:
        return 0.0
    norms = [_norm(alike) for alike in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if (value := norm.item()) > max_norm:
        for alike in by_mesh.values():
            nn.utils.clip_grads_with_norm_(alike, max_norm, norm)
    return value


def _norm(parameters: Iterable[Tensor]) -> Tensor:
    return _full(nn.utils.get_total_norm([part for p in parameters for part in _norm_parts(p.grad)]))


def _norm_parts(gradient: Tensor | None) -> list[Tensor]:
    """Tensors that together have the norm of `gradient`. On a CPU torch splits one long sum among threads, so rounding
    would depend on their number; here each row of a matrix has its own norm, computed by one thread."""
    if gradient is None:
        return []
    if gradient.device.type != "cpu" or isinstance(gradient, DTensor) or gradient.numel() <= _SERIAL:
        return [gradient]
    flat, whole = gradient.flatten(), gradient.numel() // _ROW * _ROW
    return [torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1), flat[whole:]]


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shares_weights(model: nn.Module) -> bool:
    """Whether a part that is gathered by itself has a weight that is also outside of it."""
    counts = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for part in _gathered_parts(model):
        inside = Counter(id(weight) for _, weight in part.named_parameters(remove_duplicate=False))
        if any(counts[weight] > count for weight, count in inside.items()):
            return True
    return False


def _gathered_parts(model: nn.Module) -> list[nn.Module]:
    """Modules that are gathered separately, inner ones first: transformer blocks, and modules whose trained weights
    have a different dtype from the rest, because gradients are reduced per dtype. The root gathers the remaining
    weights."""
    blocks = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    main_dtype = next((p.dtype for p in model.parameters() if p.requires_grad), None)

    def is_part(module: nn.Module) -> bool:
        own = module.parameters(recurse=False)
        return type(module).__name__ in blocks or any(p.requires_grad and p.dtype != main_dtype for p in own)

    return [module for module in reversed([*model.modules()]) if is_part(module)]


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _without_weights(model: Any) -> Any:
    """A copy of the model on the meta device; tied weights stay tied."""
    hollow = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, hollow).eval()


@torch.inference_mode(False)
@torch.no_grad()
def _set_weights(model: nn.Module, source: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Sets the weights of `model` to `change` of the weights of the same name in `source`. Tied weights change once."""
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
