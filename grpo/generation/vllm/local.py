"""vLLM in the trainer's process, on the same devices; weights are passed by reference.

In one process, `tensor_parallel_size` above 1 makes vLLM start workers. Under torchrun every rank has an engine (vLLM's
external launcher). It samples its own prompts or, with `tensor_parallel_size` n, shares a model with n - 1 neighbours,
which must all call `sample` the same number of times. Ranks that sample by themselves, as a sampling job's do, start
engines at other times than their neighbours; each then runs in a child process, which is in no process group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.data.completions import Completion, Ends, each_end
from grpo.distributed.checkpoint import rng_state, set_rng_state
from grpo.errors import InputError, TrainingStopped
from grpo.generation.vllm.request import LOGPROBS, check, chunked_prefill, parameters, prompt_seed
from grpo.generation.vllm.weight_transfer import BACKEND, UNKNOWN
from grpo.generation.vllm.weight_update import check_sampled_by, replace_weights, version_of
from grpo.processes.lifetime import ENDS_WITH_PARENT

_AS_FITS = -1
"""vLLM's value for the model's context length, or the part of it for which the KV cache has room. Without it a model
with a long context does not start, however short the prompts are."""
_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",  # with it, a group of one process would wait for another to lead it
)
_LEAKING = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE", "VLLM_ENABLE_V1_MULTIPROCESSING")


class LocalVLLM:
    """See `grpo.generation.engines.Engine`. `dtype`: the trainer's, unless the settings name one. `alone`: other ranks
    have nothing to do with this engine; it takes no updates."""

    exact = False  # other kernels round differently
    name, reads_files = "vllm", True

    def __init__(self, model: str, settings: VLLM, *, eos_id: Ends, dtype: str = "float32", alone: bool = False):
        if importlib.util.find_spec("vllm") is None:
            raise InputError("vllm is not installed here; pip install vllm, or choose another engine")
        self._eos_id = eos_id
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._shared, self._child = ranks > 1 and not alone, ranks > 1 and alone
        self._spawned = settings.tensor_parallel_size > 1 and not self._shared
        self._partners = settings.tensor_parallel_size if self._shared else 1
        self._requests = 0
        self._held = UNKNOWN
        with _undisturbed(), _in_child() if self._child else contextlib.nullcontext():
            self._llm = self._start(model, settings, dtype)
        self.longest: int = self._llm.model_config.max_model_len
        self._sleeps: bool = self._llm.model_config.enable_sleep_mode

    def _start(self, model: str, settings: VLLM, dtype: str) -> Any:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self._child else "0"
        _make_readable(sys.modules.get("llvmlite.binding.ffi"))
        vllm: Any = importlib.import_module("vllm")
        platform = importlib.import_module("vllm.platforms").current_platform
        cache = settings.kv_cache_gb
        options: dict[str, Any] = {
            "tensor_parallel_size": settings.tensor_parallel_size,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
            "max_model_len": settings.max_model_len or _AS_FITS,
            "dtype": settings.dtype or dtype,
            "enforce_eager": settings.enforce_eager,
            "enable_chunked_prefill": chunked_prefill(),
            "enable_sleep_mode": platform.is_sleep_mode_available(),
            "distributed_executor_backend": ("external_launcher" if self._shared else "mp" if self._spawned else "uni"),
            "logprobs_mode": LOGPROBS,
            "generation_config": "vllm",
            "worker_extension_cls": "grpo.generation.vllm.worker.Extension",
            "weight_transfer_config": {"backend": BACKEND},
        }
        try:
            return vllm.LLM(model=model, **(options | settings.options))
        except (ValueError, RuntimeError, AssertionError) as error:
            raise InputError(f"vllm: cannot start with {model}: {textwrap.shorten(str(error), 400)}") from error

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: int,
        settings: Sampling,
        seeds: Sequence[int],
        *,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields each prompt's index and completions as soon as its last one has ended.

        Equal seeds, prompts and settings give equal completions. Does not use the trainer's random generators.
        """
        check(prompts, settings, self.longest, logprobs)
        params: Any = importlib.import_module("vllm.sampling_params")
        waiting: dict[str, int | None] = {}
        engine = self._llm.llm_engine
        try:
            for own, index, prompt, seed in self._everyones(prompts, seeds):
                sampling_parameters = parameters(per_prompt, settings, self._eos_id, prompt_seed(seed), logprobs)
                kind = params.RequestOutputKind.FINAL_ONLY
                # Log-probabilities in lists of numbers: an object for each token takes longer to make.
                request = params.SamplingParams(**sampling_parameters, output_kind=kind, flat_logprobs=True)
                self._requests += 1
                name = f"r1flow-{self._requests}"
                engine.add_request(name, {"prompt_token_ids": list(prompt)}, request)
                waiting[name] = index if own else None
            while waiting:
                # vLLM's CPU sampler advances torch's global generator, even though all our requests have seeds.
                state = torch.get_rng_state()
                outputs = engine.step()
                torch.set_rng_state(state)
                for output in outputs:
                    if output.finished:
                        place = waiting.pop(output.request_id)
                        if place is not None:
                            yield place, [self._completion(choice, logprobs) for choice in output.outputs]
        finally:
            engine.abort_request(list(waiting))

    def _everyones(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> Iterator[tuple[bool, int, Sequence[int], int]]:
        """(whether it is this rank's, index, prompt, seed) for all prompts of the ranks that share a model."""
        requests = [*zip(prompts, seeds, strict=True)]
        gathered: list[Any] = [requests]
        place = 0
        if self._partners > 1:
            group = importlib.import_module("vllm.distributed.parallel_state").get_tp_group()
            gathered, place = [None] * self._partners, group.rank_in_group
            dist.all_gather_object(gathered, requests, group=group.cpu_group)
        for number, theirs in enumerate(gathered):
            for index, (prompt, seed) in enumerate(theirs):
                yield number == place, index, prompt, seed

    def _completion(self, choice: Any, with_logprobs: bool) -> Completion:
        check_sampled_by((span.version for span in choice.weight_versions), self._held)
        tokens = list(choice.token_ids)
        logprobs: list[float] = []
        if with_logprobs:
            sampled = choice.logprobs  # of each token, with no others
            if [*sampled.token_ids] != tokens:
                raise TrainingStopped("vllm: log-probabilities of other tokens than it sampled")
            logprobs = [*sampled.logprobs]
        return Completion(tokens, logprobs, tokens[-1] in each_end(self._eos_id))

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces the weights: full tensors by their Hugging Face names. Raises TrainingStopped if the workers do not
        have all of them afterwards."""
        self._held = UNKNOWN
        replace_weights(self, weights, version, self._hand_over)
        if not self._llm.reset_prefix_cache():
            raise TrainingStopped("vllm: its prefix cache is in use while weights change; finish sampling first")
        self._held = version

    def _hand_over(self, bucket: list[tuple[str, Tensor]]) -> None:
        # Pickling a tensor for another process includes its whole storage, which may be much larger.
        tensors = ((name, tensor.detach()) for name, tensor in bucket)
        self.part(tensors=[(name, t.cpu().clone() if self._spawned else t) for name, t in tensors])

    def version(self) -> int:
        """Version of the weights that all workers hold; UNKNOWN (-1) before the first update, or if they differ."""
        return version_of(self.states())

    # The steps of an update: grpo.generation.vllm.weight_update.Control.

    def start(self) -> None:
        self._llm.start_weight_update()

    def part(self, **part: Any) -> None:
        self._llm.update_weights({"update_info": part})

    def finish(self) -> None:
        self._llm.finish_weight_update()

    def label(self, version: str) -> None:
        self._llm.update_weight_version(version)

    def states(self) -> list[dict[str, Any]]:
        return self._llm.collective_rpc("policy_weights")

    def sleep(self) -> None:
        """Moves the weights to CPU memory and drops the cache; does nothing on a CPU."""
        if self._sleeps:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()

    def close(self) -> None:
        client = self._llm.llm_engine.engine_core
        if self._shared:
            # vLLM's own shutdown would destroy the default process group, which is the trainer's.
            client._finalizer.detach()
            client.engine_core.model_executor.shutdown()
            importlib.import_module("vllm.distributed.parallel_state").destroy_model_parallel()
        else:
            client.shutdown()


def _make_readable(ffi: Any) -> None:
    """On a CPU, vLLM 0.32 reads the `__dict__` of whatever modules hold. llvmlite's library has none, and answers that
    name, like any other, with a function of that name."""
    if ffi is None or not hasattr(ffi.lib, "__dict__"):
        return
    kind, own = type(ffi.lib), type(ffi.lib).__getattr__

    def named(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return own(self, name)

    kind.__getattr__ = named


@contextlib.contextmanager
def _in_child() -> Iterator[None]:
    """What is started here is a child that dies with this process, and whose only GPU is this process's."""
    variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", ENDS_WITH_PARENT: "1"}
    if torch.cuda.is_available():
        own = torch.cuda.current_device()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        variables["CUDA_VISIBLE_DEVICES"] = seen[own] if own < len(seen) and seen[own] else str(own)
    before = {name: os.environ.get(name) for name in (*variables, *_OF_TORCHRUN)}
    for name in _OF_TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        _restore(before)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Restores process state that vLLM changes: random generators, torch's threads, and environment variables that
    later processes would inherit."""
    state = rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    variables = {name: os.environ.get(name) for name in _LEAKING}
    try:
        yield
    finally:
        _restore(variables)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        set_rng_state(state)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# Workers that vLLM spawns import the trainer's main module, and this one with it.
_make_readable(sys.modules.get("llvmlite.binding.ffi"))
