"""The recipes that come with the project. Imports nothing large, because completion in a shell loads this module."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"


def shipped() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))
