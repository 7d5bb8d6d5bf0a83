"""Source digests of a user's own functions, and a check whether a step reward is a folder with a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo.config.engines import OwnEngine, TextEngineSettings
from grpo.rewards.registry import source_digest
from grpo.rewards.steps import is_folder

__all__ = ["code_digests", "is_folder", "source_digest"]


def code_digests(names: Iterable[str] = (), engines: Iterable[TextEngineSettings | None] = ()) -> dict[str, Any]:
    """Digests of the user's own functions, for the key of a stage that calls them: the functions in `names`
    (module:function) and in engines of kind "function". Empty if there are none."""
    own = [*names, *(engine.function for engine in engines if isinstance(engine, OwnEngine))]
    return {"user_code": {name: source_digest(name) for name in own}} if own else {}
