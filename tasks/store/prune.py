"""Removes artifacts that no kept run needs.

These are kept: the current artifacts of every recipe and seed, the newest artifact of every stage and seed, artifacts
that a caller names (promoted models, what live runs use), the inputs of every running or interrupted attempt, and
everything that any of these was made from.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.store.audit import attempt_record
from tasks.store.local_folder import QUARANTINE, REMOVED
from tasks.store.manifest import Manifest
from tasks.store.stale import current_digests
from tasks.store.store import Store


@dataclass(frozen=True)
class Pruning:
    """What can be removed. `kept`: reason -> number of artifacts. An artifact with several reasons counts once, under
    the first of them."""

    artifacts: list[Manifest]
    folders: list[Path]
    unfinished: list[Path] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)


def plan_pruning(store: Store, named: Mapping[str, Iterable[str]], in_use: Iterable[str]) -> Pruning:
    """Finds what no kept run needs. `named`: reason -> digests to keep. `in_use`: digests that live runs use."""
    manifests = store.list()
    by_digest = {manifest.digest: manifest for manifest in manifests}  # of equal attempts, the newest
    newest = {(manifest.stage, manifest.config.get("seed")): manifest.digest for manifest in manifests}
    used = {*in_use, *store.backend.uses()}
    roots = {"current": current_digests(store), "newest of its stage": newest.values(), "in use": used, **named}
    kept: set[str] = set()
    counts = {}
    for reason, digests in roots.items():
        found = {digest for digest in digests if digest in by_digest} - kept
        counts[reason] = len(found)
        kept |= found
    counts["made from"] = len(_lineage(kept, by_digest) - kept)
    kept |= _lineage(kept, by_digest)
    used |= _lineage(used, by_digest)
    removable = [
        manifest
        for manifest in manifests
        if manifest.digest not in kept or (by_digest[manifest.digest] is not manifest and manifest.digest not in used)
    ]
    folders = [path for path in (store.root / QUARANTINE, store.root / REMOVED) if path.is_dir()]
    unfinished = [work for work in sorted(store.root.glob("work/*/")) if _is_idle(store, work)]
    return Pruning(removable, folders, unfinished, {reason: count for reason, count in counts.items() if count})


def remove_artifact(store: Store, manifest: Manifest) -> bool:
    """Removes an artifact, for all readers at the same moment. Returns False if a process is working on its key."""
    with store.idle(manifest.key) as idle:
        if not idle:
            return False
        store.backend.remove(manifest)
    return True


def remove_work(store: Store, work: Path) -> bool:
    """Removes an interrupted attempt. Returns False if a process is working on its key."""
    key, _ = attempt_record(work)
    with store.idle(*([key] if key else [])) as idle:
        if idle:
            shutil.rmtree(work, ignore_errors=True)
    return idle


def size_of(path: Path) -> int:
    """Total size in bytes of the files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())


def _lineage(digests: Iterable[str], by_digest: Mapping[str, Manifest]) -> set[str]:
    """Digests of all ancestors of these artifacts. The artifacts themselves are included only if one is an ancestor of
    another."""
    found: set[str] = set()
    queue = [digest for digest in digests if digest in by_digest]
    while queue:
        for ref in by_digest[queue.pop()].inputs.values():
            if ref.digest in by_digest and ref.digest not in found:
                found.add(ref.digest)
                queue.append(ref.digest)
    return found


def _is_idle(store: Store, work: Path) -> bool:
    key, _ = attempt_record(work)
    with store.idle(*([key] if key else [])) as idle:
        return idle and key is not None
