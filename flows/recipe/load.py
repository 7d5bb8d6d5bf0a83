"""Loads a shipped recipe or a TOML file, with overrides. Mistakes are reported on one line."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from flows.recipe.schema import Recipe
from flows.recipe.shipped import RECIPES, shipped
from flows.recipe.suggestions import suggestion
from grpo.errors import InputError
from grpo.secret_values import secret_in, walk
from tasks.paths import expanded

LARGEST = 2**53
"""Largest integer in a recipe. Beyond it, JSON in a browser, and so Prefect's forms, would change the number."""


def shipped_text(name: str) -> str:
    """The TOML text of a shipped recipe.

    Raises:
        InputError: there is none with this name.
    """
    known = shipped()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"unknown recipe {name!r}; {hint}recipes: {', '.join(known)}, or a path that ends in .toml")
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


def load_recipe(name: str, overrides: Iterable[str] = (), seed: int | None = None) -> Recipe:
    """A shipped recipe by name, or a TOML file by path, with ``section.field=value`` overrides (TOML values)."""
    text, where = _read(name)
    values = _parse(text, where)
    for override in overrides:
        _override(values, override)
    if seed is not None:
        values["seed"] = seed
    if secret := secret_in(values):
        raise InputError(f"{where}: {secret}")
    if fault := _odd_number(values):
        raise InputError(f"{where}: {fault}")
    try:
        # Strict as for JSON: lists and tables are converted, but neither true nor "3" is a number.
        return Recipe.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        # From Python 3.12 on, json writes what is nested more deeply than pydantic reads.
        too_deep = any("recursion limit" in mistake["msg"] for mistake in error.errors(include_input=False))
        raise InputError(f"{where}: {_TOO_DEEP if too_deep else _explain(error, values)}") from None
    except RecursionError:
        raise InputError(f"{where}: {_TOO_DEEP}") from None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also raised for a number with thousands of digits
        message = " ".join(str(error).partition(";")[0].split())
        raise InputError(f"{where}: not valid TOML: {message}") from None
    except RecursionError:
        raise InputError(f"{where}: {_TOO_DEEP}") from None


_TOO_DEEP = "lists or tables are nested too deeply; no field needs more than ten"


def _odd_number(values: Any) -> str | None:
    """What is wrong with the first number that JSON, forms or databases would refuse or change: NaN, an infinity, or an
    integer beyond 2^53."""
    for place, value in walk(values):
        if isinstance(value, float) and value != value:
            return f"{place}: this is not a number (nan)"
        if isinstance(value, float) and math.isinf(value):
            return f"{place}: this is not a finite number ({value})"
        if isinstance(value, int) and abs(value) > LARGEST:
            digits = int(value.bit_length() * 0.30103) + 1  # Python prints no number with more than 4,300 digits
            return f"{place}: {digits:,} digits are too many; the largest number here is 2^53"
    return None


def _read(name: str) -> tuple[str, str]:
    if name.endswith(".toml"):
        path = expanded(name)
        if not path.is_file():
            raise InputError(f"{name}: no such recipe file")
        try:
            return path.read_text(encoding="utf-8"), name
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: not UTF-8 text (byte {error.start})") from None
    return shipped_text(name), f"recipe {name!r}"


def _override(values: dict[str, Any], override: str) -> None:
    path, equals, raw = override.partition("=")
    if not equals or not path:
        raise InputError(f"--set {override}: write section.field=value")
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": raw}  # a bare word is taken as a string
    except ValueError as error:
        raise InputError(f"--set {path}: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise InputError(f"--set {path[:80]}: {_TOO_DEEP}") from None
    if parsed.keys() != {"value"}:
        raise InputError(f"--set {path}: there is more than one value; give each field a --set of its own")
    value = parsed["value"]
    *parents, last = path.strip().split(".")
    place: Any = values
    for parent in parents:
        place = _descend(place, parent, override, path)
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise InputError(f"--set {override}: {path} is no field of the recipe")


def _descend(place: Any, key: str, override: str, path: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, key, override)]
    if not isinstance(place, dict):
        raise InputError(f"--set {override}: {path} is no field of the recipe")
    return place.setdefault(key, {})


def _index(place: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or len(key) > 9 or int(key) >= len(place):
        raise InputError(f"--set {override}: {key!r} must be a number below {len(place)} here")
    return int(key)


def _explain(error: ValidationError, values: dict[str, Any]) -> str:
    """The first mistake on one line: field, problem, value, and the closest known name.

    Unknown fields come first, because if a name is misspelled, the correct one is reported as missing too.
    """
    first = min(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
    location, kind = _without_kinds(first["loc"], values)
    field = ".".join(map(str, location))
    if first["type"] == "extra_forbidden":
        of = f" of kind {kind!r}" if kind else ""
        return f"{field}: unknown field{of}; {suggestion(location, kind) or 'remove it'}"
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        return f"{field}.kind: must be one of {context['expected_tags']} (got {context['tag']!r})"
    if first["type"] == "union_tag_not_found":
        return f"{field}.kind: is missing; a table here is one of several kinds, and needs to say which"
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    shown = f" (got {value!r})" if isinstance(value, (str, int, float, bool)) else ""
    more = len(error.errors()) - 1
    return (f"{field}: " if field else "") + message + shown + (f"; and {more} more" if more else "")


def _without_kinds(location: tuple[int | str, ...], values: Any) -> tuple[tuple[int | str, ...], str | None]:
    """A mistake's location without the kinds that pydantic inserts, and the kind of the table that contains it."""
    place, parts, kind = values, [], None
    for number, part in enumerate(location):
        if isinstance(place, dict) and place.get("kind") == part and number < len(location) - 1:
            kind = str(part)
            continue
        parts.append(part)
        kind = kind if number == len(location) - 1 else None
        inside = (isinstance(place, dict) and part in place) or (isinstance(place, list) and isinstance(part, int))
        place = place[part] if inside else None
    return tuple(parts), kind
