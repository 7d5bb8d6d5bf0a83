"""Settings of the engines that sample completions.

A trainer's rollouts are sampled by transformers in the trainer's process, or by vLLM. Sampling jobs may also use an
endpoint or an engine written by the user.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

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
        description="'local': in the trainer's process, on its devices. 'server': one that runs on devices of its own."
    )

    url: str = Field(
        "http://127.0.0.1:8000", pattern=r"^https?://[^/\s@]+/?$", description="The server, without a path."
    )
    api_key_env: str | None = Field(None, description="Environment variable that holds the server's key. None: none.")
    timeout_s: float = Field(
        3600.0, gt=0, description="Seconds for one prompt's group of completions, and for one update of the weights."
    )
    retries: int = Field(
        6, ge=0, description="How often a request is repeated when the server is away, overloaded or fails."
    )
    concurrency: int = Field(64, ge=1, description="Prompts asked at a time; vLLM itself decides what it computes.")
    transfer: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="How weights travel. nccl: from GPU to GPU, which must be different ones. gloo: through the "
        "processors' memory. auto: nccl if trainer and server are both on GPUs.",
    )

    tensor_parallel_size: int = Field(
        1, ge=1, description="Devices that one copy of the model is split over. Under torchrun: neighbouring ranks."
    )
    gpu_memory_utilization: float = Field(
        0.3, gt=0, le=1, description="Share of a GPU's memory for weights and cache; the trainer needs the rest."
    )
    kv_cache_gb: float | None = Field(
        None, gt=0, description="Cache of keys and values, GiB. None: what gpu_memory_utilization leaves for it."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt and completion together, tokens. None: what the model was made for."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Type of weights and arithmetic while sampling. None: the trainer's."
    )
    enforce_eager: bool = Field(
        False, description="No compilation and no CUDA graphs: starts sooner, samples more slowly."
    )
    options: dict[str, Any] = Field({}, description="More arguments of vllm.LLM, by vLLM's names.")

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
    base_url: str = Field(
        pattern=r"^https?://[^/\s@]+(/|$)", description="Endpoint up to and with /v1, for example http://node7:8000/v1."
    )
    model: str = Field(description="Name of the model at the endpoint.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the key. None: none is sent.")
    timeout_s: float = Field(600.0, gt=0, description="Seconds for one completion.")
    retries: int = Field(
        8, ge=0, description="How often a request is repeated when the service is away, overloaded or fails."
    )
    concurrency: int = Field(64, ge=1, description="Requests under way at a time.")
    requests_per_minute: float | None = Field(None, gt=0, description="The service's rate limit. None: no limit.")
    body: dict[str, Any] = Field({}, description="More fields of each request, by the service's names.")


class OwnEngine(Settings):
    """An engine that the user wrote."""

    kind: Literal["function"]
    function: str = Field(
        pattern=r"^[\w.]+:\w+$",
        description="module:function; without arguments it returns a `grpo.generation.text_engines.TextEngine`.",
    )


TextEngineSettings = Annotated[VLLM | Endpoint | OwnEngine, Field(discriminator="kind")]
