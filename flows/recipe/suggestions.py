"""Suggestions for a field that the recipe does not have: what a misspelled or incomplete name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from flows.recipe.schema import Recipe

_MOST = 3


def members(model: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """Models that a field's value, or an item of its list, can have."""
    return list(_models(model.model_fields[field].annotation))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def suggestion(location: tuple[int | str, ...], kind: str | None = None) -> str:
    """What an unknown field at `location` may have meant, as the end of a message; "" if nothing is close.

    `kind`: kind of the table that contains the field, if tables of several kinds are allowed there.
    """
    models, wrong = _models_at(location), str(location[-1])
    own = [model for model in models if kind is None or _is_of(model, kind)]
    if close := difflib.get_close_matches(wrong, [name for model in own for name in model.model_fields], n=1):
        return f"did you mean {close[0]!r}?"
    if any(wrong in model.model_fields for model in models):
        return "another kind has it: change kind, or remove it"
    if elsewhere := paths_of(wrong):
        more = f", or {len(elsewhere) - _MOST} more" if len(elsewhere) > _MOST else ""
        return f"did you mean {' or '.join(map(repr, elsewhere[:_MOST]))}{more}?"
    return ""


def _is_of(model: type[BaseModel], kind: str) -> bool:
    return "kind" in model.model_fields and kind in get_args(model.model_fields["kind"].annotation)


def _models_at(location: tuple[int | str, ...]) -> list[type[BaseModel]]:
    """Possible models of the table that contains an unknown field."""
    models: list[type[BaseModel]] = [Recipe]
    for part in location[:-1]:
        if isinstance(part, str):  # in a list, every item has the same models
            models = [m for model in models if part in model.model_fields for m in members(model, part)] or models
    return models


def paths_of(name: str) -> list[str]:
    """Dotted paths of all fields with this name, in the recipe's order; only those with the fewest parts."""
    level: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    for _ in range(5):
        if found := [f"{path}{name}" for path, model in level if name in model.model_fields]:
            return list(dict.fromkeys(found))
        level = [
            (f"{path}{field}.{'0.' if _is_list(model, field) else ''}", inner)
            for path, model in level
            for field in model.model_fields
            for inner in members(model, field)
        ]
    return []


def _is_list(model: type[BaseModel], field: str) -> bool:
    return "list[" in str(model.model_fields[field].annotation)
