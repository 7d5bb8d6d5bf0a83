"""The version of what a study runs, by the stage contract: records of other versions do not count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.stage_contract.stage import Step, key_of
from flows.stage_graphs import r1_graph


def recipe_version(recipe: Recipe, graph: Iterable[Step]) -> str:
    """12 hex digits that change with whatever decides the outputs of the graph's stages: their versions and their
    settings. They do not change with code that computes the same, as the keys of artifacts do not, nor with the
    content of files that settings name."""
    keys = sorted({key_of(step.stage, step.config(recipe), recipe.seed, {}) for step in graph})
    return hashlib.sha256(" ".join(keys).encode()).hexdigest()[:12]


def r1_version(name: str) -> str:
    """Of the flow r1 with the recipe `name`."""
    recipe = load_recipe(name)
    return recipe_version(recipe, r1_graph(recipe))
