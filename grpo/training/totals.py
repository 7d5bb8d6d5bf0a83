"""Statistics of the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Totals:
    """Scalars summed over micro-batches; for names that end in _min or _max, the minimum or maximum.

    They stay on their device until `read`, because reading a number waits for all earlier work on a GPU.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def add(self, measured: Mapping[str, Tensor]) -> None:
        """Adds a micro-batch's scalars."""
        for name, tensor in measured.items():
            # MPS has no float64.
            value = tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)
            if name not in self._totals:
                self._totals[name] = value
            elif name.endswith("_min"):
                self._totals[name] = torch.minimum(self._totals[name], value)
            elif name.endswith("_max"):
                self._totals[name] = torch.maximum(self._totals[name], value)
            else:
                self._totals[name] = self._totals[name] + value

    def read(self) -> dict[str, float]:
        """Returns all of them as numbers, with one copy from the device."""
        if not self._totals:
            return {}
        return dict(zip(self._totals, torch.stack([*self._totals.values()]).tolist(), strict=True))
