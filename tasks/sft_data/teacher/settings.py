"""Settings of a teacher: a model that writes data instead of the policy."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo.config.common import Sampling
from grpo.config.engines import Endpoint, OwnEngine, TextEngineSettings


class Teacher(BaseModel):
    """A model that writes data instead of the policy (R1: DeepSeek-V3)."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(
        None,
        min_length=1,
        description="Model folder or hub name, for transformers and vLLM. An endpoint serves its own.",
    )
    engine: TextEngineSettings | None = Field(
        None,
        description="Sampling engine: vLLM, an OpenAI-compatible endpoint, your own. None: as hardware.sampler says.",
    )
    sampling: Sampling = Field(description="Its sampling settings. R1: unpublished.")
    instruction: str | None = Field(
        None, min_length=1, description="Its prompt, with the placeholders of the default. None: the default."
    )

    @model_validator(mode="after")
    def _model_is_known(self) -> Teacher:
        serves_its_own = isinstance(self.engine, (Endpoint, OwnEngine))
        if serves_its_own and self.model is not None:
            raise ValueError("model: an engine of kind 'endpoint' or 'function' has its own; leave model out")
        if not serves_its_own and self.model is None:
            raise ValueError("model is missing; give a folder or hub name, or an engine of kind 'endpoint'")
        return self

    @property
    def identity(self) -> str:
        """The teacher's name in the field `policy` of its samples."""
        if isinstance(self.engine, Endpoint):
            return self.engine.model
        return self.engine.function if isinstance(self.engine, OwnEngine) else str(self.model)

    def task(self, model: str | None = None) -> dict[str, Any]:
        """Fields of a sampling task. `model`: where the model is on this machine, if not found by its name."""
        return {
            "model": model or self.model or self.identity,
            "policy": self.identity,
            "engine": self.engine,
            "sampling": self.sampling,
        }
