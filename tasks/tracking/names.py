"""Names, values and tables in the form that MLflow accepts, and the names of runs.

A run's name says which settings override the recipe's file, never how it differs from an earlier run. So equal names
mean equal settings, and deleting a run does not change what other names mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.store.diff import shorten
from tasks.tracking.tags import TABLES_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient

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


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as MLflow's UI reads a table: JSON with one list per row, and every column that a row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return json.dumps({"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]})


def write_table(client: MlflowClient, run_id: str, file: str, text: str) -> None:
    """Writes a whole `table`. MLflow's own call appends to one that is there, so that repeating it doubles rows."""
    client.log_text(run_id, text, file)
    known = json.loads(client.get_run(run_id).data.tags.get(TABLES_TAG, "[]"))
    if (entry := {"path": file, "type": "table"}) not in known:
        client.set_tag(run_id, TABLES_TAG, json.dumps([*known, entry]))


def _cell(value: Any) -> Any:
    """Nested values are JSON text, and numbers that JSON does not have are None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False)


def batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """The items in lists of `size`, which MLflow limits."""
    everything = [*items]
    return (everything[i : i + size] for i in range(0, len(everything), size))
