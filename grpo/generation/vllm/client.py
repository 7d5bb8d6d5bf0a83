"""vLLM as a server on separate devices: the trainer's side, which does not need vLLM."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.data.completions import Completion, Ends, each_end
from grpo.errors import InputError, TrainingStopped
from grpo.generation.vllm.request import LOGPROBS, check, parameters, prompt_seed
from grpo.generation.vllm.weight_transfer import SHAPE, UNKNOWN, Sender, layout
from grpo.generation.vllm.weight_update import check_sampled_by, replace_weights, version_of
from grpo.http.client import Away, Http, Refused

_TRANSFER_S = 300.0
"""Maximum wait for a tensor to be received, seconds; enough for a server that is still processing the previous one."""


class ServerVLLM:
    """See `grpo.generation.engines.Engine`. `logprobs`: whether any call will need log-probabilities, which
    takes a server that reports them at the sampling temperature."""

    exact = False  # other kernels round differently
    name, reads_files = "vllm", True

    def __init__(self, model: str, settings: VLLM, *, eos_id: Ends, logprobs: bool = True):
        key = None
        if settings.api_key_env is not None and not (key := os.environ.get(settings.api_key_env)):
            raise InputError(f"vllm: environment variable {settings.api_key_env} is not set; api_key_env names it")
        self._settings, self._eos_id = settings, eos_id
        self._key = key
        self._http = self._client()
        self._sender: Sender | None = None
        self._held = UNKNOWN
        self._shared = dist.is_initialized() and dist.get_world_size() > 1
        self.sends = not self._shared or dist.get_rank() == 0
        start = f"start one with: python -m grpo.generation.vllm.server {model}"
        try:
            served = self._http.get("/v1/models")["data"][0]
            self._name, self.longest = served["id"], served["max_model_len"]
            self._workers = self.states()
            self._http.post("/resume")  # a trainer killed during an update left the server paused
        except Away as error:
            raise InputError(f"vllm: no server: {error}; {start}") from None
        except (Refused, KeyError, IndexError, TypeError) as error:
            raise InputError(f"vllm: {settings.url} takes no weights from a trainer ({error}); {start}") from None
        self._check_model(model, logprobs)

    def _check_model(self, model: str, logprobs: bool) -> None:
        state = self._workers[0]
        own = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config()
        for name in SHAPE:
            if (theirs := state["model"][name]) != (ours := getattr(own, name, None)):
                raise InputError(
                    f"vllm: {self._settings.url} serves another model than {model}: its {name} is {theirs}, ours {ours}"
                )
        if logprobs and state["logprobs"] != LOGPROBS:
            raise InputError(
                f"vllm: {self._settings.url} runs with --logprobs-mode {state['logprobs']}, not {LOGPROBS}"
            )

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

        Equal seeds give equal completions as far as the server's batching allows: its arithmetic may depend on the rest
        of a batch. Raises TrainingStopped if the server stays unreachable.
        """
        check(prompts, settings, self.longest, logprobs)
        if self._held == UNKNOWN:
            raise TrainingStopped("vllm: the server has no weights from this trainer yet, and what it has may be any")
        http, pool = self._client(), ThreadPoolExecutor(self._settings.concurrency)
        futures: dict[Future[list[Completion]], int] = {}
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            request = parameters(per_prompt, settings, self._eos_id, prompt_seed(seed), logprobs)
            futures[pool.submit(self._ask, http, prompt, request, self._held)] = index
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except (Away, Refused) as error:
            raise TrainingStopped(f"vllm: {error}") from None
        finally:  # the caller may have stopped iterating: end the server's requests too
            pool.shutdown(wait=False, cancel_futures=True)
            http.abandon()
            pool.shutdown()

    def _ask(self, http: Http, prompt: Sequence[int], request: dict[str, Any], version: int) -> list[Completion]:
        body = {"model": self._name, "token_ids": list(prompt), "sampling_params": request}
        choices = sorted(http.post("/inference/v1/generate", body)["choices"], key=lambda choice: choice["index"])
        with_logprobs = request["logprobs"] is not None
        return [self._completion(choice, version, with_logprobs) for choice in choices]

    def _completion(self, choice: Any, version: int, with_logprobs: bool) -> Completion:
        if choice["finish_reason"] not in ("stop", "length"):
            raise TrainingStopped(f"vllm: the server broke a completion off ({choice['finish_reason']!r})")
        check_sampled_by((span["version"] for span in choice["weight_versions"]), version)
        tokens = choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]] if with_logprobs else []
        assert not with_logprobs or len(logprobs) == len(tokens), (len(logprobs), len(tokens))
        return Completion(tokens, logprobs, tokens[-1] in each_end(self._eos_id))

    def _client(self) -> Http:
        return Http(self._settings.url, self._settings.timeout_s, self._settings.retries, self._key)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends new weights: full tensors by their Hugging Face names.

        Completions in progress finish first, with the old weights. Under torchrun every rank must call this, because
        gathering a tensor involves all ranks; rank 0 sends. Raises TrainingStopped, on every rank, if the server does
        not have all the weights afterwards.
        """
        self._held = UNKNOWN
        remaining = iter(weights)
        fault = self._fault(lambda: self._replace(remaining, version))
        if self._shared:
            for _ in remaining:
                pass
        self._raise_on_all(fault)
        self._held = version

    def _replace(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        try:
            self._once("/pause?mode=wait&clear_cache=false")
            try:
                replace_weights(self, weights, version, self._broadcast)
                if not self._once("/reset_prefix_cache")["success"]:
                    raise TrainingStopped("vllm: its prefix cache, computed by the old weights, is still in use")
            finally:
                self._once("/resume")
        except TrainingStopped:
            self._sender = None  # it is unknown whether its receivers are still listening
            raise

    def _fault(self, act: Callable[[], Any]) -> str | None:
        """Runs `act` on the rank that talks to the server. Returns what kept it from its end."""
        if not self.sends:
            return None
        try:
            act()
        except Away as error:
            return f"vllm: {error}"
        except Refused as error:
            return f"vllm: {self._settings.url} refused: {error}"
        except TrainingStopped as stopped:
            return str(stopped)
        return None

    def _raise_on_all(self, fault: str | None) -> None:
        """Raises TrainingStopped on every rank if rank 0 has a fault. No other goes on before rank 0 asks."""
        shown = [fault]
        if self._shared:
            dist.broadcast_object_list(shown, src=0)
        if shown[0] is not None:
            raise TrainingStopped(shown[0])

    def _broadcast(self, bucket: list[tuple[str, Tensor]]) -> None:
        sender = self._connected(bucket[0][1])
        with _meanwhile(self.part, layout=layout(bucket)) as check_server:
            sender.send(bucket, check_server)

    def _connected(self, first: Tensor) -> Sender:
        """Returns the connected sender. The first call creates it; the device of `first` helps choose the backend."""
        if self._sender is None:
            backend = self._settings.transfer
            if backend == "auto":
                both = first.device.type == "cuda" and self._workers[0]["device"] == "cuda"
                backend = "nccl" if both else "gloo"
            world = self._http.get("/get_world_size")["world_size"]
            sender = Sender(_address_towards(self._http), world, backend, _TRANSFER_S)
            info = {"init_info": sender.rendezvous()}
            with _meanwhile(self._once, "/init_weight_transfer_engine", info):
                sender.connect()
            self._sender = sender
        return self._sender

    # The steps of an update: grpo.generation.vllm.weight_update.Control.

    def start(self) -> None:
        self._once("/start_weight_update")

    def part(self, **part: Any) -> None:
        self._once("/update_weights", {"update_info": part})

    def finish(self) -> None:
        self._once("/finish_weight_update")

    def label(self, version: str) -> None:
        self._once("/update_weight_version", {"new_version": version})

    def states(self) -> list[dict[str, Any]]:
        return self._http.post("/collective_rpc", {"method": "policy_weights"})["results"]

    def version(self) -> int:
        """Version of the weights that all workers hold; UNKNOWN (-1) before the first update, or if they differ."""
        return version_of(self.states())

    def _once(self, path: str, body: Any = None) -> Any:
        return self._http.post(path, body, retries=0)

    def sleep(self) -> None:
        """Frees memory if the server was started with --enable-sleep-mode. Under torchrun every rank must call this:
        rank 0 sends the server to sleep once all have their completions, which would be lost otherwise. Raises
        TrainingStopped, on every rank, if the server does not do it."""
        if self._workers[0]["sleeps"]:
            if self._shared:
                dist.barrier()
            self._raise_on_all(self._fault(lambda: self._http.post("/sleep?level=1")))

    def wake(self) -> None:
        """Under torchrun every rank must call this; none samples before rank 0 has woken the server. Raises
        TrainingStopped, on every rank, if the server does not wake."""
        if self._workers[0]["sleeps"]:
            self._raise_on_all(self._fault(lambda: self._http.post("/wake_up")))

    def close(self) -> None:
        """Does nothing: the server keeps running until its owner stops it."""
        self._sender = None


@contextlib.contextmanager
def _meanwhile(call: Callable[..., Any], *arguments: Any, **named: Any) -> Iterator[Callable[[], None]]:
    """Runs the call in a thread while the block runs. The block gets a function that raises once the call has
    failed."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)

    def check_call() -> None:
        if done.done():
            done.result()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield check_call
    except Exception:
        check_call()  # the call's error is the cause of what failed in the block
        raise
    done.result()


def _address_towards(http: Http) -> str:
    """This machine's address as the server sees it. Nothing is sent: connecting a datagram socket only looks up the
    route."""
    kind, _, _, _, target = socket.getaddrinfo(http.host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as route:
        route.connect(target)
        return str(route.getsockname()[0])
