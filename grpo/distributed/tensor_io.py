"""Weights and optimizer state in a folder, written and read by any number of processes.

Each process writes its shards (torch.distributed.checkpoint). Tensors are stored by name, so that a reader can take its
shard of each.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from grpo.errors import InputError

Modules = Mapping[str, torch.nn.Module]
Optimizers = Mapping[str, torch.optim.Optimizer]


def write(folder: Path, modules: Modules, optimizers: Optimizers) -> None:
    """Writes the tensors of `modules` that training changes (for a frozen module, all) and the state of `optimizers`,
    and syncs them to disk. All processes must call it with the same folder, which must not contain tensors yet. Every
    parameter of an optimizer must belong to one of the modules, whose names identify its state."""
    tensors = _weights(modules) | dict(_states(modules, optimizers))
    with _quiet():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder))


def read(folder: Path, modules: Modules, optimizers: Optimizers) -> None:
    """The inverse of `write`, in place. All processes must call it.

    Raises InputError if the folder holds different tensors or tensors of other sizes.
    """
    saved = _Reader(folder).read_metadata().state_dict_metadata
    for name, optimizer in optimizers.items():
        _prepare(optimizer, {p: f"{name}.{of}." for p, of in _names(modules).items()}, saved)
    tensors = _weights(modules) | dict(_states(modules, optimizers))
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    saved_sizes = {name: tuple(entry.size) for name, entry in saved.items()}  # type: ignore[union-attr]
    if sizes != saved_sizes:
        name, *_ = sorted(name for name, _ in sizes.items() ^ saved_sizes.items())
        raise InputError(
            f"{folder}: a checkpoint of another model: {name} is {saved_sizes.get(name, 'missing')} there and "
            f"{sizes.get(name, 'missing')} here; take the settings it was made with, or remove it to start anew"
        )
    with _quiet():
        dcp.load(dict(tensors), storage_reader=_Reader(folder))


def check(folder: Path) -> None:
    """Raises an exception if the list of tensors cannot be read, or if a tensor file is missing or too short."""
    with _quiet():
        metadata = _Reader(folder).read_metadata()
    for part in (metadata.storage_data or {}).values():
        if (folder / part.relative_path).stat().st_size < part.offset + part.length:
            raise EOFError(f"{part.relative_path} is too short")


def _weights(modules: Modules) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for prefix, module in modules.items():
        every = dict(module.named_parameters())
        trained = {name: p for name, p in every.items() if p.requires_grad}
        weights |= {f"{prefix}.{name}": p.detach() for name, p in (trained or every).items()}
    return weights


def _names(modules: Modules) -> dict[Tensor, str]:
    return {p: f"{prefix}.{name}" for prefix, module in modules.items() for name, p in module.named_parameters()}


def _states(modules: Modules, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    names = _names(modules)
    for prefix, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                name = f"{prefix}.{names[parameter]}.{key}"
                # Of unsharded tensors only one process's copy is kept, which is right only for values such as step
                # counters.
                whole = isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.numel() == 1
                assert whole, f"{name} is neither sharded nor the same in all processes"
                yield name, value


def _prepare(optimizer: torch.optim.Optimizer, prefixes: dict[Tensor, str], saved: Mapping[str, Any]) -> None:
    """Creates optimizer state for exactly those parameters that have state in `saved`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p for p in parameters if any(name.startswith(prefixes[p]) for name in saved)]
    if any(p not in optimizer.state for p in kept):
        _make_state(optimizer, parameters)
    for parameter in set(parameters) - set(kept):
        optimizer.state.pop(parameter, None)


def _make_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Creates state by taking a first step. The state, and the weights that the step changes, are overwritten
    afterwards."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Reader(dcp.FileSystemReader):
    """Reads the list of tensors safely: torch would unpickle it, which can run arbitrary code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # the name in Python 3.13
        cls = super().find_class(module, name) if module in _KNOWN else None
        if isinstance(cls, torch.dtype) or name in _KNOWN.get(module, ()):
            return cls
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath"},
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .* in a single process")  # the normal case
        yield
