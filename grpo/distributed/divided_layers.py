"""Layers whose weights the processes of a group divide among themselves (tensor and expert parallelism).

A process keeps one part of the columns of a layer's first matrices (queries, keys, values; gate and up), which is its
part of the heads or of the intermediate states, and the same part of the rows of the last matrix. Of experts it keeps
some whole. Each process computes with its part for all tokens of the group, and the sum of their outputs is the
layer's. So a process never gathers the layer's weights, only its tokens, and FSDP shards and gathers its part among the
processes that keep the same one.

Which layers can be divided so, and how, transformers says of each model (`base_model_tp_plan`, `base_model_ep_plan`).
Others, such as latent attention, embeddings and norms, are left to FSDP, which shards them among all processes. Tokens
outside of divided layers are shared (`grpo.distributed.sequence_group`), so gradients of these weights are sums over
all processes, also where a divided layer uses them for its heads only.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import linear
from torch.utils._pytree import tree_map

from grpo.distributed.sequence_group import SequenceGroup, sequence_group

COLUMNS, ROWS = "colwise", "rowwise"
UNDIVIDED = "replicated_with_grad_allreduce"
"""Styles in transformers' plans. The last one: norms of a process's own heads, whose gradients are sums."""


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divides layers of `model`, in place, over a mesh of one dimension, the processes of a `SequenceGroup`. The model
    may be on the meta device. Returns the modules with divided weights, which are DTensors then."""
    # Gathering a weight that is sharded in two ways takes two steps, of which torch warns each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    of_experts = {*plan, *(getattr(model, "_ep_plan", None) or {})}
    size, divided = mesh.size(), list[nn.Module]()
    for name, module in [*model.named_modules()]:
        styles = {key: plan.get(_pattern(f"{name}.{key}")) for key, _ in module.named_children()}
        matrices = {key: style for key, style in styles.items() if style is not None and style != UNDIVIDED}
        if _can_divide_matrices(module, matrices, size):
            _divide_matrices(module, matrices, mesh)
            divided += [module.get_submodule(key) for key in matrices]
        elif _pattern(name) in of_experts and _can_divide_experts(module, size):
            _divide_experts(module, mesh)
            divided.append(module)
        else:
            continue
        _unfuse_around(model, name)
    return divided


def _pattern(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _unfuse_around(model: nn.Module, name: str) -> None:
    """Restores the forward passes of the blocks around a module. Fused ones use its weights without calling it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if parts[end - 1].isdecimal():
            model.get_submodule(".".join(parts[:end])).__dict__.pop("forward", None)


def _can_divide_matrices(module: nn.Module, styles: Mapping[str, str], size: int) -> bool:
    if {*styles.values()} != {COLUMNS, ROWS}:
        return False
    unit = size * getattr(module, "head_dim", 1)  # whole heads
    for key, style in styles.items():
        matrix = module.get_submodule(key)
        if type(matrix) is not nn.Linear or (style == ROWS and matrix.bias is not None):
            return False
        if (matrix.out_features if style == COLUMNS else matrix.in_features) % unit:
            return False
    return True


def _divide_matrices(module: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    module.__dict__.pop("forward", None)
    module.register_forward_pre_hook(_with_all_tokens, with_kwargs=True)
    for key, style in styles.items():
        matrix: Any = module.get_submodule(key)
        _place(matrix, mesh, 0 if style == COLUMNS else 1)
        matrix.forward = MethodType(_columns if style == COLUMNS else _rows, matrix)


def _can_divide_experts(module: nn.Module, size: int) -> bool:
    count, weights = getattr(module, "num_experts", None), [*module.parameters()]
    if not isinstance(count, int) or count % size or any(len(weight) != count for weight in weights):
        return False
    return len(weights) > 0 and len(inspect.signature(type(module).forward).parameters) == 4


def _divide_experts(module: Any, mesh: DeviceMesh) -> None:
    _place(module, mesh, 0)
    module.forward = MethodType(_experts, module)


def _place(module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
    """Replaces a module's own weights by their parts along `dim`."""
    for key, weight in [*module.named_parameters(recurse=False)]:
        part = distribute_tensor(weight.detach(), mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(part, requires_grad=weight.requires_grad))


# Forward passes


def _with_all_tokens(module: nn.Module, arguments: Any, named: Any) -> Any:
    """Arguments of a divided layer with all tokens in the place of this process's."""
    group = sequence_group()
    if group is None:
        return arguments, named
    states = arguments[0] if arguments else named["hidden_states"]
    return _gathered(group, states, (arguments, named))


def _gathered(group: SequenceGroup, states: Tensor, arguments: Any) -> Any:
    """`arguments`, with all tokens in those tensors that have a value for each token of `states` [..., N, H]."""
    by_token, dim = states.shape[:-1], states.dim() - 2

    def gathered(value: Any) -> Any:
        return group.all_tokens(value, dim) if isinstance(value, Tensor) and value.shape[:-1] == by_token else value

    return tree_map(gathered, arguments)


def _columns(self: Any, states: Tensor) -> Tensor:
    part = _whole if sequence_group() is None else _local
    return linear(states, part(self.weight), None if self.bias is None else part(self.bias))


def _rows(self: Any, states: Tensor) -> Tensor:
    group = sequence_group()
    if group is None:
        return linear(states, _whole(self.weight))
    return group.sum_of_part(linear(states, _local(self.weight)), states.dim() - 2)


def _experts(self: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Outputs [N, H] of experts for `states` [N, H], with the indices [N, k] and weights [N, k] that a router chose."""
    group, own = sequence_group(), type(self).forward
    output: Tensor
    if group is None:
        with _weights_as(self, _whole):
            output = own(self, states, chosen, weights)
        return output
    states, chosen, weights = _gathered(group, states, (states, chosen, weights))
    share = self.num_experts // group.size
    first = group.rank * share
    mine = (chosen >= first) & (chosen < first + share)
    # Index `share` is no expert; then transformers leaves out what its kernels do not compute.
    with _weights_as(self, _local, num_experts=share, _is_expert_parallel=True):
        output = own(self, states, torch.where(mine, chosen - first, share), weights * mine)
    return group.sum_of_part(output, 0)


@contextlib.contextmanager
def _weights_as(module: nn.Module, change: Callable[[Tensor], Tensor], **attributes: Any) -> Iterator[None]:
    """Context in which a module's own code sees changed weights and attributes."""
    weights, before = dict(module._parameters), {name: getattr(module, name, None) for name in attributes}
    try:
        for name, weight in weights.items():
            module._parameters[name] = None if weight is None else change(weight)  # type: ignore[assignment]
        vars(module).update(attributes)
        yield
    finally:
        module._parameters.update(weights)
        vars(module).update(before)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _whole(weight: Tensor) -> Tensor:
    """The whole weight, for a process that computes alone; all processes must call it together."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def parts_within(modules: Sequence[nn.Module], part: Any) -> list[nn.Module]:
    """Those of `modules` that are in `part`."""
    inside = {*part.modules()}
    return [module for module in modules if module in inside]
