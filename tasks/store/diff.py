"""What differs between two configurations, field by field."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_SHOWN_CHARACTERS = 40


class Change(NamedTuple):
    """One leaf; None where a side does not have it. `field` is its dotted path."""

    field: str
    old: Any
    new: Any


def changed(old: Any, new: Any, path: str = "") -> list[Change]:
    """Every leaf that differs between two configurations of plain values; lists of one length item by item."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in sorted(old.keys() | new.keys())
            for change in changed(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [c for i, (a, b) in enumerate(zip(old, new, strict=True)) for c in changed(a, b, f"{path}.{i}")]
    return [] if old == new else [Change(path, old, new)]


def short(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
