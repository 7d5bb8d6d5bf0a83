"""The commands `r1 recipes` and `r1 init`: list the shipped recipes, and copy one to edit it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from flows.cli.terminal import width
from grpo.errors import InputError
from tasks.paths import expanded

_WIDTH = 100


def add(commands: Any) -> None:
    """Adds `recipes` and `init` to the parser."""
    command = commands.add_parser("recipes", help="the recipes that are shipped")
    command.add_argument("--json", action="store_true", help="print them as one JSON object")
    command = commands.add_parser("init", help="a recipe of your own: a copy of a shipped one, its fields explained")
    command.add_argument("file", metavar="FILE.toml", type=Path, help="the new file; its name is the recipe's name")
    command.add_argument("--from", dest="origin", metavar="RECIPE", default="tiny", help="default: tiny")


def recipes(args: argparse.Namespace) -> int:
    """Lists the shipped recipes. Returns the exit code."""
    from flows.recipe.load import shipped, shipped_text

    texts = {name: tomllib.loads(shipped_text(name)) for name in shipped()}
    if args.json:
        listed = [{"name": name, "description": of["description"]} for name, of in texts.items()]
        print(json.dumps({"recipes": listed}))
        return 0
    indent, columns = max(map(len, texts)) + 2, width(sys.stdout) or _WIDTH
    for name, of in texts.items():
        head = f"{name:<{indent}}"
        print(textwrap.fill(of["description"], columns, initial_indent=head, subsequent_indent=" " * indent))
    return 0


def init(args: argparse.Namespace) -> int:
    """Writes a commented copy of a shipped recipe. Returns the exit code."""
    from flows.recipe.commented import commented
    from flows.recipe.load import load_recipe, shipped_text

    path = expanded(args.file)
    if path.suffix != ".toml" or not re.fullmatch(r"[\w.-]+", path.stem):
        raise InputError(f"{args.file}: give a name of letters, digits, - and _ that ends in .toml")
    text = commented(shipped_text(args.origin), path.stem, args.origin)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{args.file}: is there already; give a new name") from None
    except OSError as error:
        raise InputError(f"{args.file}: {error.strerror}; give a file in a folder that can be written") from None
    recipe = load_recipe(str(path))
    print(f"{args.file} is the recipe {recipe.name!r}; `r1 plan {args.file}` shows what it would run", file=sys.stderr)
    return 0
