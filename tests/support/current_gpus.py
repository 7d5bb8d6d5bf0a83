"""The current GPU of each thread, without GPUs: as in CUDA, a new thread begins with GPU 0."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch


class CurrentGPUs(threading.local):
    """`number`: of the calling thread's current GPU."""

    number = 0

    def set_device(self, device: torch.device) -> None:
        self.number = device.index

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self.number
        self.set_device(device)
        try:
            yield
        finally:
            self.number = before


def stand_in(patch: pytest.MonkeyPatch) -> CurrentGPUs:
    """Takes the place of torch's own."""
    gpus = CurrentGPUs()
    patch.setattr(torch.cuda, "set_device", gpus.set_device)
    patch.setattr(torch.cuda, "device", gpus.device)
    return gpus
