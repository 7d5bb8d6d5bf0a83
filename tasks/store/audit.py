"""Finds problems in a store and repairs them: damaged artifacts, missing inputs, leftovers of attempts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from tasks.store.backend import Flaw
from tasks.store.manifest import Manifest
from tasks.store.stale import dangling_pointers
from tasks.store.store import Store


def audit(store: Store, *, every_byte: bool = True) -> Generator[Flaw, None, set[str]]:
    """Yields every problem in a store. Returns the digests of the intact artifacts.

    Without `every_byte`, files that have not changed since they were last compared with their hashes are not read.
    Anything that a live process is working on is skipped.
    """
    whole = yield from store.backend.flaws(store.idle, every_byte=every_byte)
    digests = {manifest.digest for manifest in whole}
    for manifest in whole:
        yield from _missing_inputs(store, manifest, digests)
    for pointer, digest in dangling_pointers(store, digests):
        said = f"the current artifact {digest[:12]} is not in the store, or damaged"
        yield Flaw("missing", f"current/{pointer}.digest", said, _removing(store, pointer))
    yield from store.backend.leftovers(store.idle)
    yield from _leftovers(store, {manifest.key for manifest in whole})
    return digests


def _missing_inputs(store: Store, manifest: Manifest, digests: set[str]) -> Iterator[Flaw]:
    for name, ref in manifest.inputs.items():
        if ref.stage is not None and ref.digest not in digests:
            said = f"its input {name}, {ref.stage} {(ref.key or ref.digest)[:12]}, is not in the store, or damaged"
            remedy = "the recipe that made it makes it again; `r1 prune` removes this one if no run needs it"
            name = _name(store, manifest.path) if manifest.remote is None else manifest.location
            yield Flaw("missing", name, said, remedy=remedy)


def _leftovers(store: Store, keys: Iterable[str]) -> Iterator[Flaw]:
    """Work that no attempt can continue, because its artifact was published or its record is damaged."""
    for work in sorted(store.root.glob("work/*/")):
        key, forced = attempt_record(work)
        if key is None:
            said = "the record of the attempt is damaged"
        elif not (work / "out").is_dir() or (key in keys and not forced):
            said = "its artifact was published"
        else:
            continue
        names = [key] if key else [path.stem for path in store.root.glob(f"locks/{work.name.rpartition('-')[2]}*.lock")]
        with store.idle(*names) as idle:
            pass
        if idle:
            yield Flaw("orphaned", _name(store, work), said, _removing_work(store, work, names))


def attempt_record(work: Path) -> tuple[str | None, bool]:
    """Key of the attempt that a work folder belongs to (None if its record is damaged), and whether it was forced."""
    try:
        record = json.loads((work / "attempt.json").read_bytes())
        return str(record["key"]), bool(record["forced"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, False


def _removing(store: Store, pointer: str) -> Callable[[], str]:
    def remove() -> str:
        store.backend.unpoint(pointer)
        return "removed"

    return remove


def _removing_work(store: Store, work: Path, keys: list[str]) -> Callable[[], str]:
    def remove() -> str:
        with store.idle(*keys) as idle:
            if idle:
                shutil.rmtree(work, ignore_errors=True)
        return "removed" if idle else ""

    return remove


def _name(store: Store, path: Path) -> str:
    return path.relative_to(store.root).as_posix()
