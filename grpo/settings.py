"""Base class of every settings model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen pydantic model that rejects unknown keys, so that a typo never silently trains with a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)
