"""Names and tags of MLflow runs that tell them apart in its lists: seed, and what differs from the run before.

A run's parent is the newest earlier finished run of the same recipe and flow, or of the same recipe and stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.errors import InputError
from tasks.store.diff import Change, changed, short
from tasks.tracking.reader import Tracked, TrackedRun

BEFORE_TAG, DIFFERS_TAG, INPUTS_TAG, SEED_TAG = "r1flow.before", "r1flow.differs", "r1flow.inputs", "r1flow.seed"
_SAID_ELSEWHERE = {"seed", "description"}
_IN_NAME = 3
_NAME_LENGTH = 200  # MLflow keeps 250 characters in PostgreSQL and fails on more
_TAG_LENGTH = 5000


@dataclass(frozen=True)
class RunName:
    name: str
    tags: dict[str, str]


def name_run(
    tracked: Tracked,
    recipe: str,
    what: str,
    identity: Mapping[str, str],
    config: Mapping[str, Any],
    config_file: str,
    seed: int,
    inputs: Mapping[str, str] | None = None,
    first: Sequence[str] = (),
) -> RunName:
    """How a run that is about to begin is called. `identity`: tags that its parent has too; `inputs`: name -> digest;
    `first`: what is said of it where it has no parent. Names matter less than runs: without MLflow there is no parent.
    """
    before, differs = None, list(first)
    try:
        if (before := tracked.newest_finished(recipe, identity)) is not None:
            differs = differences(tracked.read_json(before.id, config_file) or {}, config)
            differs += other_inputs(before, inputs or {})
    except InputError:  # its own log says why; creating the run will stop at the same fault
        before = None
    tags = {SEED_TAG: str(seed), DIFFERS_TAG: "; ".join(differs)[:_TAG_LENGTH], BEFORE_TAG: before.id if before else ""}
    if inputs:
        tags[INPUTS_TAG] = json.dumps(dict(inputs))
    return RunName(join_name(f"{what} seed {seed}", differs), tags)


def join_name(start: str, differs: Sequence[str]) -> str:
    """`start` with what differs behind it, as far as it is short."""
    shown = list(differs[:_IN_NAME])
    while shown:
        more = len(differs) - len(shown)
        name = " ".join([start, *shown, *([f"and {more} more"] if more else [])])
        if len(name) <= _NAME_LENGTH:
            return name
        shown.pop()
    return f"{start} and {len(differs)} changes" if differs else start


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field=value` for each field that is other than before."""
    return [_said(change) for change in changed(old, dict(new)) if change.field not in _SAID_ELSEWHERE]


def other_inputs(before: TrackedRun, inputs: Mapping[str, str]) -> list[str]:
    """Names of the inputs that are not the parent's, as one of its differences."""
    old = json.loads(before.tags.get(INPUTS_TAG, "{}"))
    other = [name for name, digest in inputs.items() if name in old and old[name] != digest]
    return [f"other {', '.join(other)}"] if other else []


def _said(change: Change) -> str:
    return f"{change.field}={short(change.new)}"
