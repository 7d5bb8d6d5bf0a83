"""Names and tags that tell MLflow runs apart in its lists: the seed, and what differs from the run before.

A run is compared with the newest earlier finished run of the same recipe and flow, or of the same recipe and stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.errors import InputError
from tasks.store.diff import Difference, Ingredients, differences, shorten
from tasks.store.manifest import InputRef
from tasks.tracking.reader import RunReader
from tasks.tracking.tags import BEFORE_TAG, DIFFERS_TAG, INPUTS_TAG, SEED_TAG

_SHOWN_ELSEWHERE = {"seed", "description"}
_MAX_IN_NAME = 3
_NAME_LENGTH = 200  # MLflow keeps 250 characters in PostgreSQL and fails on more
_TAG_LENGTH = 5000


@dataclass(frozen=True)
class RunName:
    """The name of a run in MLflow, and the tags that explain it."""

    name: str
    tags: dict[str, str]


def name_run(
    reader: RunReader,
    recipe: str,
    what: str,
    identity: Mapping[str, str],
    config: Mapping[str, Any],
    config_file: str,
    seed: int,
    inputs: Mapping[str, str] | None = None,
    first: Sequence[str] = (),
) -> RunName:
    """Name and tags of a run that is about to begin.

    `identity`: tags that the run before has too. `inputs`: name -> digest. `first`: the differences to show where there
    is no run before. A run matters more than its name: if MLflow cannot be read, the run is named without a comparison.
    """
    before, differing = None, list(first)
    try:
        if (before := reader.newest_finished(recipe, identity)) is not None:
            old_inputs = json.loads(before.tags.get(INPUTS_TAG, "{}"))
            # Versions are no part of a name.
            old = Ingredients(0, reader.read_json(before.id, config_file) or {}, _refs(old_inputs))
            differing = describe(differences(old, Ingredients(0, config, _refs(inputs or {}))))
    except InputError:  # the cause is logged there; creating the run will stop at the same fault
        before = None
    tags = {
        SEED_TAG: str(seed),
        DIFFERS_TAG: "; ".join(differing)[:_TAG_LENGTH],
        BEFORE_TAG: before.id if before else "",
    }
    if inputs:
        tags[INPUTS_TAG] = json.dumps(dict(inputs))
    return RunName(join_name(f"{what} seed {seed}", differing), tags)


def join_name(start: str, differing: Sequence[str]) -> str:
    """`start` followed by as many of the differences as fit."""
    shown = list(differing[:_MAX_IN_NAME])
    while shown:
        more = len(differing) - len(shown)
        name = " ".join([start, *shown, *([f"and {more} more"] if more else [])])
        if len(name) <= _NAME_LENGTH:
            return name
        shown.pop()
    return f"{start} and {len(differing)} changes" if differing else start


def describe(reasons: Sequence[Difference]) -> list[str]:
    """`field=value` for each changed field, then one entry with the inputs whose contents changed."""
    fields = [r for r in reasons if r.kind == "field" and r.name not in _SHOWN_ELSEWHERE]
    inputs = [r.name for r in reasons if r.kind == "input" and r.old is not None and r.new is not None]
    return [f"{r.name}={shorten(r.new)}" for r in fields] + ([f"other {', '.join(inputs)}"] if inputs else [])


def _refs(digests: Mapping[str, str]) -> dict[str, InputRef]:
    return {name: InputRef(digest) for name, digest in digests.items()}
