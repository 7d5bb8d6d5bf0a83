"""Which artifacts are stale: they were made from something that has been made again since.

For each recipe and seed, every stage has a *current* artifact: the one that a run of this recipe made, reused or read
last. A current artifact is *stale* when one of its inputs is not the current artifact of the stage that the input came
from, or is stale itself. What is not current is history, and never stale. So a stage that is made again with the same
bytes makes nothing stale, nor does another recipe or seed; and a run that goes back to older artifacts makes these
current again.

Only the pointers to what is current are kept, `<root>/current/<recipe>-<seed>/<slot>.digest`; staleness is computed
from them and the manifests each time. A slot is a stage and where its inputs come from: `evaluate` of the flows r1 and
r1_zero are two.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from tasks.store.store import Manifest, Store
from tasks.tracking.client import Tracking

STALE_TAG = "r1flow.stale"
_FOLDER, _SUFFIX = "current", "digest"


def make_current(store: Store, recipe: str, seed: int, manifests: Iterable[Manifest]) -> bool:
    """Let these artifacts be the current ones of a recipe and seed. True if one of them was not before."""
    return any([_point(_line(store, recipe, seed), manifest) for manifest in manifests])


def lines_of(store: Store, seed: int, inputs: Iterable[Manifest]) -> list[str]:
    """The recipes that have all of these artifacts as current ones under this seed; none where there are no inputs.

    A stage that somebody runs by itself on what a recipe has made belongs to that recipe.
    """
    wanted = {_slot(manifest): manifest.digest for manifest in inputs}
    found = []
    for (recipe, of_seed), pointers in _lines(store).items():
        if wanted and of_seed == seed and all(pointers.get(slot) == digest for slot, digest in wanted.items()):
            found.append(recipe)
    return found


def stale(store: Store) -> dict[str, str]:
    """Key of each stale artifact -> why it is, in a line."""
    known = {manifest.digest: manifest for manifest in store.list()}
    reasons: dict[str, str] = {}
    for (recipe, seed), pointers in _lines(store).items():
        current = {slot: known[digest] for slot, digest in pointers.items() if digest in known}
        checked: dict[str, str | None] = {}
        for manifest in current.values():
            if why := _reason(manifest, current, known, checked):
                reasons.setdefault(manifest.key, f"{why} ({recipe}, seed {seed})")
    return reasons


def mark(store: Store, tracking: Tracking) -> None:
    """Tag the MLflow runs that made stale artifacts with the reason, and take the tag from all others."""
    reasons = stale(store)
    wanted = {m.mlflow_run_id: reasons[m.key] for m in store.list() if m.key in reasons and m.mlflow_run_id}
    for run_id, reason in tracking.tagged(STALE_TAG).items():
        if run_id not in wanted:
            tracking.delete_tag(run_id, STALE_TAG)
        elif wanted[run_id] == reason:
            del wanted[run_id]
    for run_id, reason in wanted.items():
        tracking.set_tags(run_id, {STALE_TAG: reason})


def _reason(
    manifest: Manifest, current: Mapping[str, Manifest], known: Mapping[str, Manifest], checked: dict[str, str | None]
) -> str | None:
    """Why one artifact is stale, None if it is not; `checked` remembers those that were looked at."""
    if manifest.digest not in checked:
        used = {name: known[ref.digest] for name, ref in manifest.inputs.items() if ref.digest in known}
        direct, indirect = [], []
        for name, read in used.items():
            now = current.get(_slot(read), read)
            if now.digest != read.digest:
                direct.append(f"{name} was {read.digest[:12]}, now is {now.digest[:12]}")
            elif _reason(read, current, known, checked):
                indirect.append(f"{name} is stale")
        checked[manifest.digest] = next(iter(direct + indirect), None)
    return checked[manifest.digest]


def _slot(manifest: Manifest) -> str:
    origins = sorted((name, ref.stage) for name, ref in manifest.inputs.items() if ref.stage)
    return f"{manifest.stage}-{hashlib.sha256(json.dumps(origins).encode()).hexdigest()[:8]}"


def _line(store: Store, recipe: str, seed: int) -> Path:
    return store.root / _FOLDER / f"{quote(recipe, safe='')}-{seed}"


def _lines(store: Store) -> dict[tuple[str, int], dict[str, str]]:
    """(recipe, seed) -> slot -> digest of the current artifact."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for pointer in sorted(store.root.glob(f"{_FOLDER}/*-*/*.{_SUFFIX}")):
        recipe, _, seed = pointer.parent.name.rpartition("-")
        lines.setdefault((unquote(recipe), int(seed)), {})[pointer.stem] = pointer.read_text().strip()
    return lines


def _point(line: Path, manifest: Manifest) -> bool:
    pointer = line / f"{_slot(manifest)}.{_SUFFIX}"
    if pointer.is_file() and pointer.read_text().strip() == manifest.digest:
        return False
    line.mkdir(parents=True, exist_ok=True)
    partial = pointer.with_suffix(f".{os.getpid()}")
    partial.write_text(manifest.digest)
    partial.replace(pointer)
    return True
