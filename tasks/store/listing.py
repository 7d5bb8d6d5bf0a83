"""Lists all manifests of a store quickly: a valid manifest that has not changed since is not validated again.

    <root>/checked/manifests.json    of each manifest that was valid: mtime, size, inode; when it was made, its attempt

Only the names and sizes of an artifact's files are checked each time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.store.checks import FOLDER
from tasks.store.manifest import MANIFEST, Manifest, check_sizes, read_manifest, trusted
from tasks.store.whole_file import write_whole

logger = logging.getLogger(__name__)


def read_manifests(root: Path, stage: str | None = None) -> list[Manifest]:
    """Manifests of all complete artifacts, or of those of one stage, oldest first. Logs a warning for each damaged
    one."""
    known = _read(root)
    right = {} if stage is None else dict(known)
    manifests = []
    for name, folder, state in _states(root, stage):
        manifest = _unchanged(folder) if _is_known(known, name, state) else read_manifest(Path(folder))
        if manifest is not None:
            right[name] = [*state, manifest.created, manifest.attempt]
            manifests.append(manifest)
    if right != known:
        _write(root, right)
    return sorted(manifests, key=lambda manifest: (manifest.created, manifest.attempt))


def newest_by_stage(root: Path) -> dict[str, Manifest]:
    """The last artifact of each stage in `read_manifests`. Reads only these, unless others changed since."""
    known = _read(root)
    by_stage: dict[str, list[tuple[str, int, str]]] = {}
    for name, folder, state in _states(root, None):
        if not _is_known(known, name, state):
            return {manifest.stage: manifest for manifest in read_manifests(root)}
        by_stage.setdefault(name.partition("/")[0], []).append((known[name][3], known[name][4], folder))
    newest_first = {stage: sorted(made, reverse=True) for stage, made in by_stage.items()}
    found = {
        stage: next((manifest for *_, folder in made if (manifest := _unchanged(folder))), None)
        for stage, made in newest_first.items()
    }
    return {stage: manifest for stage, manifest in found.items() if manifest is not None}


def _is_known(known: dict[str, Any], name: str, state: list[int]) -> bool:
    match known.get(name):
        case [*before, str(), int()]:
            return before == state
    return False


def _states(root: Path, stage: str | None) -> Iterator[tuple[str, str, list[int]]]:
    """Yields STAGE/KEY/ATTEMPT, the folder, and mtime, size and inode of the manifest of each artifact."""
    for name, folder in _folders(root, stage):
        try:
            stat = os.stat(f"{folder}/{MANIFEST}")
        except OSError:  # being removed, or not an artifact: see tasks.store.audit
            continue
        yield name, folder, [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def _folders(root: Path, stage: str | None) -> Iterator[tuple[str, str]]:
    """Yields STAGE/KEY/ATTEMPT and the path of each folder that should be an artifact."""
    artifacts = os.fspath(root / "artifacts")
    for one in [stage] if stage else _names(artifacts):
        for key in _names(f"{artifacts}/{one}"):
            for attempt in _names(f"{artifacts}/{one}/{key}"):
                yield f"{one}/{key}/{attempt}", f"{artifacts}/{one}/{key}/{attempt}"


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _unchanged(folder: str) -> Manifest | None:
    """A manifest that was valid when last read. None, with a warning, if the sizes of its files are wrong."""
    path = Path(folder)
    try:
        with open(f"{folder}/{MANIFEST}", "rb") as file:
            manifest = trusted(file.read(), path)
        check_sizes(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return read_manifest(path)  # logs what is wrong
    return manifest


def _file(root: Path) -> Path:
    return root / FOLDER / "manifests.json"


def _read(root: Path) -> dict[str, Any]:
    try:
        known = json.loads(_file(root).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(root: Path, right: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # disk full or read-only: manifests are checked again next time
        write_whole(_file(root), json.dumps(right, separators=(",", ":")))
