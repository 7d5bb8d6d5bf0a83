"""Settings of the order of problems."""

from __future__ import annotations

from pydantic import Field

from grpo.settings import Settings


class Curriculum(Settings):
    """Skips problems for a while whose last pass rate shows that they teach little."""

    min_pass_rate: float = Field(0.0, ge=0, le=1, description="Skip problems solved at most this often.")
    max_pass_rate: float = Field(1.0, ge=0, le=1, description="Skip problems solved at least this often.")
    rest: int = Field(2, ge=1, description="Passes over the data for which such a problem is skipped.")
