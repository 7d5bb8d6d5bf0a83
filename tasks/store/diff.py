"""Differences between two configurations, and the reasons why two artifacts of a stage have different keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tasks.store.manifest import InputRef, Manifest

_SHOWN_CHARACTERS = 40


class Change(NamedTuple):
    """One changed leaf of a configuration. `field` is its dotted path; a value is None on the side without the
    field."""

    field: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Ingredients:
    """Everything that a key is computed from in this version, except the stage's name."""

    version: int
    config: Mapping[str, Any]
    inputs: Mapping[str, InputRef]

    @classmethod
    def of(cls, manifest: Manifest) -> Ingredients:
        return cls(manifest.stage_version, manifest.config_today, manifest.inputs)


@dataclass(frozen=True)
class Difference:
    """One reason why two keys differ. `name` is the field's path or the input's name. `old` and `new` are values of a
    field, stage versions, or references of an input (None on the side without that input)."""

    kind: Literal["field", "input", "version"]
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.kind == "version":
            return f"stage version {self.old} -> {self.new}"
        if self.kind == "field":
            old, new = _shorten_both(str(self.old), str(self.new))
            return f"{self.name}: {old} -> {new}"
        if self.old is None or self.new is None:
            return f"input {self.name} is {'new' if self.old is None else 'gone'}"
        return f"input {self.name} changed"


def differences(old: Ingredients, new: Ingredients) -> list[Difference]:
    """All reasons why two keys of one stage differ: fields first, then inputs, then the version."""
    reasons = [
        Difference("field", change.field, change.old, change.new)
        for change in changed_fields(dict(old.config), dict(new.config))
    ]
    for name in [*new.inputs, *(name for name in old.inputs if name not in new.inputs)]:
        old_ref, new_ref = old.inputs.get(name), new.inputs.get(name)
        if old_ref is None or new_ref is None or old_ref.digest != new_ref.digest:
            reasons.append(Difference("input", name, old_ref, new_ref))
    if old.version != new.version:
        reasons.append(Difference("version", "", old.version, new.version))
    return reasons


Keys = tuple[str | int, ...]
"""Path of a value in nested configurations: keys of tables and places in lists. A key may contain a dot."""


def changed_fields(old: Any, new: Any) -> list[Change]:
    """Every leaf that differs between two configurations of plain values. Lists of equal length are compared item by
    item."""
    return [Change(dotted(keys), a, b) for keys, a, b in changed_leaves(old, new)]


def changed_leaves(old: Any, new: Any, keys: Keys = ()) -> list[tuple[Keys, Any, Any]]:
    """(path, old, new) of the same leaves."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            leaf
            for name in sorted(old.keys() | new.keys())
            for leaf in changed_leaves(old.get(name), new.get(name), (*keys, name))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [leaf for place, (a, b) in pairs for leaf in changed_leaves(a, b, (*keys, place))]
    return [] if old == new else [(keys, old, new)]


def dotted(keys: Keys) -> str:
    """A path as text, for people."""
    return ".".join(map(str, keys))


def shorten(value: Any) -> str:
    """A value on one line, truncated to 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _shorten_both(old: str, new: str) -> tuple[str, str]:
    """Two texts on one line each, truncated to 40 characters. If they are long, their common beginning is dropped
    too."""
    old, new = " ".join(old.split()), " ".join(new.split())
    if max(len(old), len(new)) > _SHOWN_CHARACTERS:
        pairs = enumerate(zip(old, new, strict=False))
        differs = next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
        same = max(0, differs - _SHOWN_CHARACTERS // 4)
        old, new = (f"…{text[same:]}" if same else text for text in (old, new))
    return shorten(old), shorten(new)
