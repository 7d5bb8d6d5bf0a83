"""Finds stale artifacts: those made from an input that has since been made again.

For each recipe and seed, every stage has a *current* artifact: the one that a run of this recipe made, reused or read
last. A current artifact is *stale* if one of its inputs is not the current artifact of the stage that the input came
from, or is stale itself. Artifacts that are not current are history and never stale. So a stage that is made again with
the same bytes makes nothing stale, and neither does another recipe or seed. A run that goes back to older artifacts
makes them current again.

Only pointers to the current artifacts are stored, under the names `<recipe>-<seed>/<slot>`. Staleness is
computed from them and the manifests each time. A slot is a stage together with the origins of its inputs: `evaluate` in
the flows r1 and r1_zero has two slots.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from urllib.parse import quote, unquote

from tasks.store.manifest import Manifest
from tasks.store.store import Store


def make_current(store: Store, recipe: str, seed: int, manifests: Iterable[Manifest]) -> bool:
    """Makes these artifacts the current ones of a recipe and seed. Returns whether any of them was not current
    before."""
    pointers = store.backend.pointers()
    changed = False
    for manifest in manifests:
        name = f"{quote(recipe, safe='')}-{seed}/{_slot(manifest)}"
        if pointers.get(name) != manifest.digest:
            store.backend.point(name, manifest.digest)
            changed = True
    return changed


def recipes_using(store: Store, seed: int, inputs: Iterable[Manifest]) -> list[str]:
    """Recipes for which all of these artifacts are current under this seed; none if there are no inputs.

    A stage that runs on its own with the artifacts of a recipe belongs to that recipe.
    """
    digests = {_slot(manifest): manifest.digest for manifest in inputs}
    if not digests:
        return []
    return [
        recipe
        for (recipe, pointer_seed), pointers in _pointers(store).items()
        if pointer_seed == seed and all(pointers.get(slot) == digest for slot, digest in digests.items())
    ]


def stale_reasons(store: Store, manifests: Iterable[Manifest] | None = None) -> dict[str, str]:
    """Key of each stale artifact -> the reason, on one line. `manifests`: the store's manifests, if already read."""
    by_digest = {manifest.digest: manifest for manifest in (store.list() if manifests is None else manifests)}
    reasons: dict[str, str] = {}
    for (recipe, seed), pointers in _pointers(store).items():
        current = {slot: by_digest[digest] for slot, digest in pointers.items() if digest in by_digest}
        checked: dict[str, str | None] = {}
        for manifest in current.values():
            if reason := _reason(manifest, current, by_digest, checked):
                reasons.setdefault(manifest.key, f"{reason} ({recipe}, seed {seed})")
    return reasons


def current_digests(store: Store) -> set[str]:
    """Digests of the current artifacts of all recipes and seeds."""
    return {digest for slots in _pointers(store).values() for digest in slots.values()}


def dangling_pointers(store: Store, digests: Container[str]) -> list[tuple[str, str]]:
    """Names of the pointers to a current artifact whose digest is not in `digests`, with that digest."""
    return [(name, digest) for name, digest in _named(store) if digest not in digests]


def _reason(
    manifest: Manifest,
    current: Mapping[str, Manifest],
    by_digest: Mapping[str, Manifest],
    checked: dict[str, str | None],
) -> str | None:
    """Why one artifact is stale; None if it is not. `checked` caches the answers by digest."""
    if manifest.digest not in checked:
        inputs = {name: by_digest[ref.digest] for name, ref in manifest.inputs.items() if ref.digest in by_digest}
        direct, indirect = [], []
        for name, read in inputs.items():
            now = current.get(_slot(read), read)
            if now.digest != read.digest:
                direct.append(f"{name} was {read.digest[:12]}, now is {now.digest[:12]}")
            elif _reason(read, current, by_digest, checked):
                indirect.append(f"{name} is stale")
        checked[manifest.digest] = next(iter(direct + indirect), None)
    return checked[manifest.digest]


def _slot(manifest: Manifest) -> str:
    origins = sorted((name, ref.stage) for name, ref in manifest.inputs.items() if ref.stage)
    return f"{manifest.stage}-{hashlib.sha256(json.dumps(origins).encode()).hexdigest()[:8]}"


def _pointers(store: Store) -> dict[tuple[str, int], dict[str, str]]:
    """(recipe, seed) -> slot -> digest of the current artifact."""
    pointers: dict[tuple[str, int], dict[str, str]] = {}
    for name, digest in _named(store):
        of, _, slot = name.partition("/")
        recipe, _, seed = of.rpartition("-")
        pointers.setdefault((unquote(recipe), int(seed)), {})[slot] = digest
    return pointers


def _named(store: Store) -> list[tuple[str, str]]:
    """Names and digests of the pointers. Names that this module did not give are left out."""
    pointers = store.backend.pointers().items()
    return [(name, digest) for name, digest in pointers if name.partition("/")[0].rpartition("-")[2].isdecimal()]
