"""Turns a shipped recipe into a text for the user to edit, with each field's description above its first use."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from flows.recipe.schema import Recipe
from flows.recipe.suggestions import members

WIDTH = 100
_HEADING = re.compile(r"\[{1,2}([\w.-]+)\]{1,2}\s*(?:#.*)?$")
_FIELD = re.compile(r"([\w-]+) *=")


def commented(text: str, name: str, origin: str) -> str:
    """The recipe `text` under another name, with descriptions as comments. Everything except the name stays the same.

    Raises:
        ValueError: a comment changed the meaning of the file.
    """
    opening = (
        f"A copy of the recipe {origin!r}: `r1 plan FILE` shows what it would run. Stages whose settings are still "
        f"those of {origin!r} are reused from its runs. Each field is explained where it first appears; a field that "
        "is not here has its default, and docs/recipes.md explains the sections."
    )
    lines = [*_comment(opening), ""]
    place: list[str] = []
    explained: set[tuple[str, str]] = set()
    for statement in _statements(text):
        if heading := _HEADING.match(statement):
            place = heading[1].split(".")
        elif field := _FIELD.match(statement):
            if not place and field[1] == "name":
                statement = re.sub(r'= *"[^"]*"', f'= "{name}"', statement, count=1)
            description = _description([*place, field[1]])
            if description and (field[1], description) not in explained:
                explained.add((field[1], description))
                lines += _comment(description)
        lines.append(statement)
    made = "\n".join(lines) + "\n"
    if tomllib.loads(made) != tomllib.loads(text) | {"name": name}:
        raise ValueError(f"the copy of recipe {origin!r} says something else")
    return made


def _statements(text: str) -> Iterator[str]:
    """Statements of a TOML file: lines, or several lines for a multi-line value."""
    waiting: list[str] = []
    for line in text.splitlines():
        waiting.append(line)
        if waiting[0].startswith(("#", "[")) or not waiting[0].strip() or _is_whole("\n".join(waiting)):
            yield "\n".join(waiting)
            waiting = []
    yield from waiting


def _is_whole(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _description(path: Sequence[str]) -> str:
    """The description of the field at a path. If the field may belong to several models, the first one's
    description."""
    models: list[Any] = [Recipe]
    for part in path[:-1]:
        models = [member for model in models if part in model.model_fields for member in members(model, part)]
    found = (model.model_fields[path[-1]].description for model in models if path[-1] in model.model_fields)
    return next(filter(None, found), "")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
