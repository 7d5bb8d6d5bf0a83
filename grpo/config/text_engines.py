"""Which engine writes completions as text, and its settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo.config.common import Settings
from grpo.config.vllm import VLLM


class Endpoint(Settings):
    """An OpenAI-compatible service: vLLM, SGLang, a hosted model. It must serve the policy that the stage samples."""

    kind: Literal["endpoint"]
    base_url: str = Field(
        pattern=r"^https?://", description="Endpoint up to and with /v1, for example http://node7:8000/v1."
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
    """An engine of the user's own."""

    kind: Literal["function"]
    function: str = Field(
        pattern=r"^[\w.]+:\w+$",
        description="module:function; without arguments it returns a `grpo.generation.text_engines.TextEngine`.",
    )


TextEngineSettings = Annotated[VLLM | Endpoint | OwnEngine, Field(discriminator="kind")]
