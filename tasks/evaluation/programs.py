"""Checks whether a recipe runs programs that a model wrote, and what those programs can do on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo.sandbox.run import missing_walls
from tasks.evaluation.sets.settings import SetData


def unwalled_programs(sources: Iterable[Any], sets: Iterable[SetData]) -> str | None:
    """One line about missing protections of the sandbox, if answers to the problems of these sources or test sets are
    or may be programs; else None."""
    sets = list(sets)
    verifiers = [known.verifier for each in sets if (known := each.known)]
    for source in (*sources, *(each.source for each in sets if each.source)):
        verifiers.append("code" if getattr(source, "verifier_column", None) else getattr(source, "verifier", "none"))
    return missing_walls() if "code" in verifiers else None
