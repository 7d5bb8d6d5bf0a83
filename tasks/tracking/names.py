"""Names and values in the form that MLflow accepts, and the names of runs.

A run's name says which settings override the recipe's file, never how it differs from an earlier run. So equal names
mean equal settings, and deleting a run does not change what other names mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tasks.store.diff import shorten

_Item = TypeVar("_Item")
_PARAM_LENGTH = 6000
_DATASET_DIGEST_LENGTH = 36
_SEPARATOR = " · "
_MAX_IN_NAME = 3
_NAME_LENGTH = 200  # with PostgreSQL, MLflow stores 250 characters and fails on more


def join_name(start: str, overrides: Sequence[str]) -> str:
    """`start`, then as many of the overrides (`field=value`) as fit. If a field is set twice, the last value counts."""
    settings = {field: value for field, _, value in (override.partition("=") for override in overrides)}
    parts = [f"{field.strip()}={shorten(value)}" for field, value in settings.items()]
    shown = parts[:_MAX_IN_NAME]
    while shown:
        more = len(parts) - len(shown)
        name = _SEPARATOR.join([start, *shown, *([f"{more} more"] if more else [])])
        if len(name) <= _NAME_LENGTH:
            return name
        shown.pop()
    return f"{start}{_SEPARATOR}{len(parts)} changes" if parts else start


def registered_name(recipe: str) -> str:
    """Name of the registered model of a recipe."""
    return re.sub(r"[/:]", "-", recipe)


def alias_name(name: str) -> str:
    """`name` as a valid alias: "qwen2.5" becomes "qwen2-5"."""
    return re.sub(r"[^\w-]", "-", name)


def dataset_digest(digest: str) -> str:
    """The first part of an artifact's digest, as long as MLflow accepts for a data set."""
    return digest[:_DATASET_DIGEST_LENGTH]


def metric_name(name: str) -> str:
    """`name` as a valid metric name: "pass@1" becomes "pass_at_1"; any other invalid character becomes "_"."""
    safe = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
    return "/".join(part for part in safe.split("/") if part.strip(".")) or "_"


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted name, text) for every value, with lists as JSON. Skips texts too long for an MLflow parameter."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(text) <= _PARAM_LENGTH:
            yield metric_name(prefix + name), text


def cell(value: Any) -> Any:
    """A value of a table: nested values are JSON text."""
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False)


def batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """The items in lists of `size`, which MLflow limits."""
    everything = [*items]
    return (everything[i : i + size] for i in range(0, len(everything), size))
