"""Names and values in the form that MLflow accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PARAM_LENGTH = 6000


def registered_name(recipe: str) -> str:
    """Name of the registered model of a recipe."""
    return re.sub(r"[/:]", "-", recipe)


def alias_name(name: str) -> str:
    """`name` as a valid alias: "qwen2.5" becomes "qwen2-5"."""
    return re.sub(r"[^\w-]", "-", name)


def metric_name(name: str) -> str:
    """`name` as a valid metric name: "pass@1" becomes "pass_at_1", any other invalid character becomes "_"."""
    safe = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    return "/".join(part for part in safe.split("/") if part.strip(".")) or "_"


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) of every value, lists as JSON. Skips texts too long for a parameter of MLflow."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) <= _PARAM_LENGTH:
            yield metric_name(prefix + name), text
