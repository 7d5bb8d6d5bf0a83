"""Lets verl train on a CPU: a platform for it, loaded by verl itself (VERL_USE_EXTERNAL_MODULES) in its environment.

verl has platforms for accelerators only. With this one a test proves the contract and the arithmetic, not speed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MACHINE_BYTES = 2**34


class _Cpu(ModuleType):
    """torch.cpu, and what torch.cuda has besides, as far as it means something without a device."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in ("get_rng_state", "set_rng_state", "manual_seed"):
            return getattr(torch, name)
        if name == "mem_get_info":
            return lambda *_: (MACHINE_BYTES, MACHINE_BYTES)
        if name == "get_device_name":
            return lambda *_: "cpu"
        return lambda *_, **__: 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """A machine without accelerators. Each process is one device."""

    device_name, vendor_name = "cpu", "any"
    device_module = _Cpu("verl_on_cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _join(**_: Any) -> tuple[int, int, int]:
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
    rank = torch.distributed.get_rank()
    return rank, rank, torch.distributed.get_world_size()


verl.utils.distributed.initialize_global_process_group = _join
verl.utils.distributed.initialize_global_process_group_ray = _join
