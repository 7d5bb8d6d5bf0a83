"""Weight updates inside vLLM's workers.

vLLM loads this file in each of its workers (`worker_extension_cls`); importing it registers the weight-transfer engine
`BACKEND`. `grpo.generation.vllm.weight_update` describes the steps of an update. vLLM's own `load_weights` fuses
and shards weights, and its layer-wise reload repacks them on platforms that pack weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from grpo.generation.vllm.weight_transfer import BACKEND, SHAPE, UNKNOWN, Backend, Fingerprint, Receiver

logger = logging.getLogger("vllm.r1flow")


@dataclass
class Rendezvous(WeightTransferInitInfo):
    """Address of the trainer, made by `grpo.generation.vllm.weight_transfer.Sender.rendezvous`."""

    address: str
    port: int
    size: int
    backend: Backend
    timeout_s: float


@dataclass
class Part(WeightTransferUpdateInfo):
    """One of: tensors from a trainer in this process; the layout of tensors that the trainer broadcasts next; the end
    of a version, with the fingerprint of all tensors."""

    tensors: list[tuple[str, Tensor]] | None = None
    layout: list[tuple[str, str, list[int]]] | None = None
    whole: dict[str, int] | None = None


class PolicyWeights(WeightTransferEngine[Rendezvous, Part]):
    """Records faults in `fault` instead of raising them: see `grpo.generation.vllm.weight_update`."""

    init_info_cls, update_info_cls = Rendezvous, Part

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version, self.updating = UNKNOWN, False
        self.fault: str | None = None
        self._receiver: Receiver | None = None
        self._begin()
        _unlink_shared_memory()

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        with self._noting():
            self._receiver = Receiver(rank, **vars(init_info))

    def start_weight_update(self) -> None:
        self._begin()
        self.version, self.updating, self.fault = UNKNOWN, True, None
        with self._noting():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method also synchronizes an accelerator, which not every platform has.
        with self._noting():
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: Part) -> None:
        if update_info.tensors is not None:
            self._load(iter(update_info.tensors))
        elif update_info.layout is not None:
            if self._receiver is None:
                raise RuntimeError("a trainer sends weights before it has joined")
            self._load(self._receiver.receive(update_info.layout))
        elif update_info.whole is not None:
            self._check(**update_info.whole)

    def finish_weight_update(self) -> None:
        with self._noting():
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_tied()
            self._pack_experts()
        self.updating = False
        if self.fault is None and self._checked is not None:
            self.version = self._checked

    def shutdown(self) -> None:
        self._receiver = None

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Records the first fault of an update. Models raise all kinds of exceptions at unexpected tensors."""
        try:
            yield
        except Exception as error:
            logger.exception("An update of the weights failed")
            self.fault = self.fault or f"{type(error).__name__}: {error}"

    def _begin(self) -> None:
        # Some layers hold products of their weights as further parameters, among them those of latent attention. What
        # vLLM keeps from the first load are its own weights, and those that the reload leaves in place.
        read = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, layer in self._default_model.named_modules()
            for name in get_layerwise_info(layer).restore_metadata[0]
        }
        self._expected = {
            name
            for name, _ in self._default_model.named_parameters()
            if name in read or name.rpartition(".")[2] in SKIP_TENSORS
        }
        self._loaded: set[str] = set()
        self._received = Fingerprint()
        self._checked: int | None = None

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        try:
            with torch.no_grad():
                loaded = self.model.load_weights(self._counted(weights))
            if loaded is None:  # some models do not report them
                self._expected = set()
            else:
                self._loaded |= loaded
        finally:
            for _ in weights:  # announced tensors are broadcast, and must be received
                pass

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._received.add(name, tensor)
            yield name, tensor

    def _check(self, version: int, tensors: int, checksum: int) -> None:
        if self._received != Fingerprint(tensors, checksum):
            raise RuntimeError(
                f"this is not what the trainer sent: {self._received.tensors} of {tensors} tensors are here, checksum "
                f"{self._received.checksum} instead of {checksum}"
            )
        # A quantized model has scales that policies do not send, so vLLM itself does not require all tensors.
        if self.model_config.quantization is None and (missing := sorted(self._expected - self._loaded)):
            raise RuntimeError(f"{len(missing)} of the model's parameters got no tensor, {missing[0]!r} first")
        self._checked = version

    def _pack_tied(self) -> None:
        # On a CPU, vLLM's heads use a packed copy of their weights. A head tied to the embedding has no tensor of its
        # own, so the reload skips it (vLLM 0.32) and it would keep the old copy.
        for layer in self.model.modules():
            if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def _pack_experts(self) -> None:
        # On a CPU, vLLM's experts use packed weights too, which its reload (vLLM 0.32) overwrites with unpacked ones.
        # Those of an incomplete update may still be packed.
        if self.device.type != "cpu" or self._checked is None:
            return
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(layer, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(layer)


def _unlink_shared_memory() -> None:
    """Unlinks the shared memory of a CPU's workers, which all of them have mapped. vLLM 0.32 leaves it behind. Under
    an external launcher the next job fails then, because the name exists."""
    for group in (get_tp_group(), get_pp_group()):
        module = getattr(group.device_communicator, "dist_module", None)
        if name := getattr(module, "group_name", None):
            Path("/dev/shm", f"{name}_{group.rank_in_group}".lstrip("/")).unlink(missing_ok=True)


class Extension:
    """Methods for `collective_rpc` in addition to those of vLLM's worker."""

    def policy_weights(self) -> dict[str, Any]:
        """Version of the weights that this worker samples from, and the fields that the trainer compares."""
        engine: PolicyWeights = self.weight_transfer_engine  # type: ignore[attr-defined]
        model = engine.model_config
        return {
            "version": engine.version,
            "updating": engine.updating,
            "fault": engine.fault,
            "device": engine.device.type,
            "logprobs": model.logprobs_mode,
            "sleeps": model.enable_sleep_mode,
            "model": {name: getattr(model.hf_text_config, name, None) for name in SHAPE},
        }


WeightTransferEngineFactory.register_engine(BACKEND, PolicyWeights)
# At each update vLLM warns about layers without weights in the checkpoint; `_check` requires all that have some.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
