"""Settings of the engines that sample completions.

A trainer's rollouts are sampled by transformers in the trainer's process, or by vLLM. Sampling jobs may also use an
endpoint or an engine written by the user.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo.config.common import Hardware, RayCluster
from grpo.http.fleet.addresses import ADDRESS
from grpo.settings import Settings

_OF_SERVER = ("url", "api_key_env", "timeout_s", "retries", "concurrency", "transfer")
_OF_LOCAL = (
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_gb",
    "max_model_len",
    "dtype",
    "enforce_eager",
    "options",
)


class VLLM(Settings):
    """vLLM as the engine that samples; it must be installed where it runs (`pip install vllm`).

    A server is started with `python -m grpo.generation.vllm.server MODEL`, and takes vLLM's own options there.
    """

    kind: Literal["local", "server"] = Field(
        description="'local': in the trainer's process, on its devices. 'server': a server with its own devices."
    )

    url: str = Field(
        "http://127.0.0.1:8000", pattern=r"^https?://[^/\s@]+/?$", description="Server URL, without a path."
    )
    api_key_env: str | None = Field(None, description="Environment variable with the server's API key. None: no key.")
    timeout_s: float = Field(
        3600.0, gt=0, description="Timeout in seconds for one prompt's group of completions, and for one weight update."
    )
    retries: int = Field(6, ge=0, description="Retries of a request if the server is unreachable, overloaded or fails.")
    concurrency: int = Field(64, ge=1, description="Prompts in flight at once; vLLM itself schedules them.")
    transfer: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="How weights are sent. nccl: GPU to GPU, which must be different GPUs. gloo: through CPU memory. "
        "auto: nccl if trainer and server are both on GPUs.",
    )

    tensor_parallel_size: int = Field(
        1, ge=1, description="Devices that one copy of the model is split across. Under torchrun: adjacent ranks."
    )
    gpu_memory_utilization: float = Field(
        0.3, gt=0, le=1, description="Share of GPU memory for weights and KV cache; the trainer needs the rest."
    )
    kv_cache_gb: float | None = Field(
        None, gt=0, description="KV cache size, GiB. None: what gpu_memory_utilization leaves for it."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Maximum prompt plus completion, tokens. None: the model's context, or what the KV cache holds.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Data type of weights and arithmetic in sampling. None: the trainer's."
    )
    enforce_eager: bool = Field(False, description="No compilation or CUDA graphs: starts faster, samples slower.")
    options: dict[str, Any] = Field({}, description="Further arguments of vllm.LLM, by vLLM's names.")

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> VLLM:
        foreign = _OF_LOCAL if self.kind == "server" else _OF_SERVER
        changed = self.model_dump(exclude_defaults=True)  # a form also sends default values
        for name in foreign:
            if name in changed:
                where = (
                    "the server's own; give it to the command that starts it"
                    if self.kind == "server"
                    else "for kind 'server' alone; leave it out"
                )
                raise ValueError(f"{name} is {where}")
        return self


class Endpoint(Settings):
    """An OpenAI-compatible service: vLLM, SGLang, a hosted model. It must serve the policy that the stage samples."""

    kind: Literal["endpoint"]
    base_url: str | None = Field(
        None,
        pattern=r"^https?://[^/\s@]+(/|$)",
        description="Endpoint URL including /v1, for example http://node7:8000/v1. Part of the key, unlike urls and "
        "urls_file. None: those.",
    )
    urls: list[Annotated[str, Field(pattern=ADDRESS)]] = Field(
        [],
        exclude_if=lambda urls: not urls,
        description="Addresses of a fleet, instead of base_url: endpoints that serve the same model and share the "
        "requests.",
    )
    urls_file: Path | None = Field(
        None,
        exclude_if=lambda path: path is None,
        description="Absolute path of a file with the fleet's addresses, one a line, instead of urls. It is read again "
        "when it changes, so that endpoints may come and go during a run.",
    )
    model: str = Field(description="Model name at the endpoint.")
    api_key_env: str | None = Field(None, description="Environment variable with the API key. None: no key is sent.")
    timeout_s: float = Field(600.0, gt=0, description="Timeout for one completion, seconds.")
    retries: int = Field(
        8, ge=0, description="Retries of a request if the service is unreachable, overloaded or fails."
    )
    concurrency: int = Field(
        64,
        ge=1,
        description="Maximum requests in flight at once at each address. After 429, 503 or a timeout it is fewer for a "
        "while.",
    )
    requests_per_minute: float | None = Field(
        None, gt=0, description="The service's rate limit, for each address. None: no limit."
    )
    copy_after: float | None = Field(
        3.0,
        gt=1,
        exclude_if=lambda factor: factor == 3.0,
        description="A request that takes longer than this multiple of the median is copied to another endpoint of the "
        "fleet if that is idle; the first answer counts. None: never.",
    )
    body: dict[str, Any] = Field({}, description="Further fields of each request, by the service's names.")

    @model_validator(mode="after")
    def _one_kind_of_address(self) -> Endpoint:
        if sum(1 for given in (self.base_url, self.urls, self.urls_file) if given) != 1:
            raise ValueError("base_url: give one of base_url, urls and urls_file")
        if self.urls_file is not None and not self.urls_file.is_absolute():
            raise ValueError(f"urls_file: {self.urls_file} is no absolute path; workers have another working directory")
        return self


class OwnEngine(Settings):
    """An engine that the user wrote."""

    kind: Literal["function"]
    function: str = Field(
        pattern=r"^[\w.]+:\w+$",
        description="module:function; called without arguments, returns a `grpo.generation.text_engines.TextEngine`.",
    )


TextEngineSettings = Annotated[VLLM | Endpoint | OwnEngine, Field(discriminator="kind")]


def devices_of(engine: TextEngineSettings | None) -> int:
    """Devices that a process needs to sample: none if the engine is elsewhere."""
    if isinstance(engine, VLLM) and engine.kind == "local":
        return engine.tensor_parallel_size
    return 0 if isinstance(engine, VLLM | Endpoint) else 1


def check_shards(engine: TextEngineSettings | None, hardware: Hardware, ray: RayCluster | None = None) -> None:
    """Raises ValueError if the processes or actors that take shards, each on its own, cannot have this engine."""
    processes, devices = hardware.processes * hardware.nodes, devices_of(engine)
    if ray is not None and processes > 1:
        raise ValueError("ray places the workers: leave hardware.processes and hardware.nodes at 1")
    if devices > 1 and processes > 1:
        raise ValueError(
            "engine.tensor_parallel_size: several processes that sample cannot share one model; set hardware.processes "
            "and hardware.nodes to 1 (vLLM then starts a worker on each device), or use an engine of kind 'server'"
        )
    if ray is not None and devices > 1 and ray.gpus and ray.gpus < devices:
        raise ValueError(
            f"ray.gpus is {ray.gpus:g}, but engine.tensor_parallel_size divides vLLM among {devices} devices; leave "
            "ray.gpus out"
        )


def check_partners(engine: TextEngineSettings | None, processes: int) -> None:
    """Raises ValueError if trainer processes cannot share a vLLM in groups. One alone starts its own workers."""
    if not isinstance(engine, VLLM) or engine.kind != "local" or processes == 1:
        return
    if processes % engine.tensor_parallel_size:
        raise ValueError(
            f"engine.tensor_parallel_size: {engine.tensor_parallel_size} processes cannot share each vLLM, because it "
            f"does not divide the {processes} processes (hardware.processes x hardware.nodes); take a divisor"
        )
