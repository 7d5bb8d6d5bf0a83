"""Float32 arithmetic on models with narrower weights, to distinguish wrong results from rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

NARROW = (torch.bfloat16, torch.float16)


class Float32(TorchFunctionMode):
    """Context in which every operation reads bfloat16 and float16 tensors as float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunction():
        return value.float() if value.dtype in NARROW else value
