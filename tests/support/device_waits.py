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
CAUSAL_BIAS = "grpo.model.packed.attention.causal_lower_right"
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
        ours = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == self.device]
        if not ours:
            return func(*args, **kwargs)
        name = func.overloadpacket
        if name in READS:
            self._add(name, ours[0])
            return 0 if name is aten._local_scalar_dense else func(*args, **kwargs)
        if name is aten._to_copy and (kwargs.get("device") or ours[0].device).type == "cpu":
            self._add(name, ours[0])
            return torch.zeros(ours[0].shape, dtype=kwargs.get("dtype") or ours[0].dtype)
        if name in (aten.index, aten.index_put, aten.index_put_):
            for index in (x for x in args[1] if isinstance(x, Tensor)):
                if index.dtype == torch.bool or index.device.type == "cpu":  # needs its number of entries, or a copy
                    self._add(name, index)
        return func(*args, **kwargs)

    def _add(self, name: Any, tensor: Tensor) -> None:
        self.found.append((str(name), tuple(tensor.shape)))


def causal_mask(queries: int, keys: int) -> Tensor:
    """What `torch.nn.attention.bias.causal_lower_right` stands for, on the meta device."""
    return torch.ones(queries, keys, dtype=torch.bool, device="meta").tril(keys - queries)
