"""Mean length of a recipe's prompts, for estimates: from the artifact of its problems, or else from its sources."""

from __future__ import annotations

from itertools import islice
from statistics import fmean

from flows.recipe.schema import Recipe
from flows.recipe.sections import Source
from flows.stages.problems import TRAIN
from grpo.data.records import Problem, read_rows
from grpo.errors import InputError
from tasks.problems.files import rows
from tasks.problems.load import load
from tasks.problems.miniature.everyday import EverydaySource, load_everyday
from tasks.problems.miniature.sums import SumsSource, load_sums
from tasks.problems.rows import read_row
from tasks.problems.sources import FileSource, HubSource
from tasks.store.manifest import Manifest

LOOKED_AT = 50
"""Number of problems read from each source, or from the artifact."""
CHARACTERS = 3.0
"""Minimum characters per token."""
TEMPLATE_TOKENS = 10
"""Tokens that the prompt template adds."""


def prompt_tokens(recipe: Recipe, made: Manifest | None) -> float | None:
    """Mean tokens per prompt. `made`: the artifact of the stage problems. None if no problem can be read here."""
    try:
        if made is not None:
            problems = [*islice(read_rows(made.local(TRAIN), Problem), LOOKED_AT)]
        else:
            problems = [problem for source in recipe.problems.sources for problem in _some(source, recipe.seed)]
    except InputError:
        return None
    return TEMPLATE_TOKENS + fmean(len(p.text) for p in problems) / CHARACTERS if problems else None


def _some(source: Source, seed: int) -> list[Problem]:
    """The first problems of a source. None from a hub data set, which is not downloaded for an estimate."""
    if isinstance(source, HubSource):
        return []
    if isinstance(source, FileSource):
        read = ((where, row) for where, row in rows(source) if not isinstance(row, InputError))
        return [read_row(source, where, row) for where, row in islice(read, LOOKED_AT)]
    few = source.model_copy(update={"count": min(source.count, LOOKED_AT)})
    if isinstance(few, EverydaySource):
        return load_everyday(few, seed).problems
    return (load_sums(few, seed) if isinstance(few, SumsSource) else load(few, seed)).problems
