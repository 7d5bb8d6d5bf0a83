"""Float64 arithmetic in code that asks for float32, to tell which of two float32 results is nearer to the truth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Within it a model of float64 weights computes in float64 where its code says float32, and experts' grouped
    products, which torch does not have in float64, are transformers' own loop over experts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is torch._grouped_mm:
            return torch.ops.transformers.grouped_mm_fallback(*args, kwargs["offs"])
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)
