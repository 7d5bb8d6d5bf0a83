"""Counts the places where a program would make the host wait for a GPU, without a GPU.

PyTorch's meta device stands in for one: its tensors have shapes but no numbers. Every number that is read from one, and
every copy from or to the host for which the host waits, goes into a list and is answered with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
CAUSAL_BIAS = "grpo.model.packed.scores.causal_lower_right"
"""PyTorch's own causal bias is a subclass of Tensor that no dispatch mode can see; `causal_mask` takes its place."""
READS = (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select)
"""Operations whose result the host has to know: its value or its shape."""


class DeviceWaits(TorchDispatchMode):
    """`found`: the waits within it, as name of the operation and shape of what was read."""

    def __init__(self, device: str = "meta"):
        super().__init__()
        self.device, self.found = device, list[tuple[str, tuple[int, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = waits_for(func, args, kwargs, self.device)
        if found is not None:
            self.found.append(found)
            if func.overloadpacket is aten._local_scalar_dense:
                return 0
            if func.overloadpacket is aten._to_copy:
                return torch.zeros(found[1], dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def waits_for(func: Any, args: Any, kwargs: dict[str, Any], device: str) -> tuple[str, tuple[int, ...]] | None:
    """The name of an operation that makes the host wait for `device`, and the shape of the tensor that it waits for."""
    name = func.overloadpacket
    there = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == device]
    if not there:
        return None
    waited: Tensor | None = None
    if name in READS or (name is aten._to_copy and _device_name(kwargs.get("device")) == "cpu"):
        waited = there[0]
    elif name in (aten.index, aten.index_put, aten.index_put_):
        # A mask needs its number of entries, and an index on the host is copied.
        indices = (x for x in args[1] if isinstance(x, Tensor))
        waited = next((x for x in indices if x.dtype == torch.bool or x.device.type == "cpu"), None)
    return None if waited is None else (str(name), tuple(waited.shape))


def _device_name(device: torch.device | str | None) -> str | None:
    return None if device is None else torch.device(device).type


def causal_mask(queries: int, keys: int) -> Tensor:
    """What `torch.nn.attention.bias.causal_lower_right` stands for, on the meta device."""
    return torch.ones(queries, keys, dtype=torch.bool, device="meta").tril(keys - queries)
