"""Settings in verl's own words: overrides of its configuration, in Hydra's syntax."""

from __future__ import annotations

from collections.abc import Mapping

Value = str | int | float | bool | None | list["Value"] | dict[str, "Value"]


def overrides(settings: Mapping[str, Value]) -> list[str]:
    """One override a setting. A name that begins with + adds what verl's defaults do not name; ++ adds or replaces."""
    return [f"{name}={_written(value)}" for name, value in settings.items()]


def _written(value: Value) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_written(inner)}" for name, inner in value.items()) + "}"
    return "null" if value is None else repr(value)
