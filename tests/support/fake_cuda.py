"""CUDA tensors without a GPU, for mistakes of device: shapes, types and devices are computed, numbers are not.

Host tensors stay real, so that what is planned on the host runs as ever. A host tensor that meets a CUDA tensor raises
what it would raise on a GPU, and where the host would wait for the GPU is counted (`tests.support.device_waits`).

Autograd asks for the device's guard, which a PyTorch without CUDA lacks, so a few lines of C++ add one that does
nothing. Even so a backward pass does not run: its engine asks for the streams of a real GPU. PyTorch's meta device does
backward passes instead (`tests/grpo/rl/test_device_waits.py`).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.device_waits import CAUSAL_BIAS, waits_for

aten = torch.ops.aten
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
"""
_loaded: list[ctypes.CDLL] = []


class FakeCuda(FakeTensorMode):
    """Within it tensors on "cuda" are fake. `waits`: where the host would have waited, answered with zeros."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)
        self.waits: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [x for x in leaves if isinstance(x, FakeTensor)]
        to_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not fakes and not to_cuda:
            return func(*args, **kwargs)
        if (
            func.overloadpacket is aten._to_copy
            and args[0].is_cpu
            and args[0].numel()
            and not kwargs.get("non_blocking")
        ):
            self.waits.append(("a copy from the host", tuple(args[0].shape)))
        elif (found := waits_for(func, args, kwargs, "cuda")) is not None:
            self.waits.append(found)
            if func.overloadpacket is aten._local_scalar_dense:
                return 0
            if func.overloadpacket is aten._to_copy:
                return torch.zeros(found[1], dtype=kwargs.get("dtype") or fakes[0].dtype)
        args, kwargs = tree_map(self._as_fake, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _as_fake(self, value: Any) -> Any:
        return self.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value


def causal_mask(queries: int, keys: int) -> Tensor:
    """As `tests.support.device_waits.causal_mask`."""
    return torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)


def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes this process ready for `FakeCuda`. Skips the test where there is no C++ compiler."""
    if not torch.backends.cuda.is_built() and not _loaded:
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        root = Path(torch.__path__[0])
        (folder / "guard.cpp").write_text(GUARD)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(folder / "guard.cpp")]
        subprocess.run([*command, "-o", str(folder / "guard.so"), f"-L{root / 'lib'}", "-lc10"], check=True)
        _loaded.append(ctypes.CDLL(str(folder / "guard.so")))
    patch.setattr(Tensor, "pin_memory", lambda self: self)
    patch.setattr(FakeTensor, "tolist", lambda self: self.cpu().tolist())  # one copy, as of a real tensor
    patch.setattr(CAUSAL_BIAS, causal_mask)
