"""`r1 completion`: commands, options and recipes by the Tab key, in bash, zsh and fish.

The script it prints asks r1 itself at each Tab, so it needs no update when commands change.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

SHELLS = ("bash", "zsh", "fish")
RECIPE_ARGUMENTS = ("recipe", "origin")
"""Destinations of arguments that take a recipe, in any command."""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("completion", help="a script that completes r1 by the Tab key, for your shell")
    command.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    """Prints the shell's script. Returns the exit code."""
    from argcomplete import shellcode

    print(shellcode(["r1"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and ends the process. Otherwise does nothing and imports nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    from argcomplete import autocomplete

    for action in _actions(parser):
        if action.dest in RECIPE_ARGUMENTS:
            action.completer = _recipes  # type: ignore[attr-defined]
    autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)


def _recipes(prefix: str, **_: Any) -> list[str]:
    from argcomplete import FilesCompleter

    from flows.recipe.shipped import shipped

    return [*shipped(), *FilesCompleter(("toml",))(prefix)]
