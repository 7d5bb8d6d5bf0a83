"""Compares artifacts with their hashes. A file is read once, and again only if its size, mtime or inode changes.

    <root>/checked/<key[:2]>/<key>-<attempt>.json    size, mtime and inode of the files when they matched their hashes

This is a cache and can be deleted. It misses changes that leave the file's time alone, such as those of a failing disk;
`r1 verify` reads every byte.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tasks.store.manifest import Manifest, file_sha256
from tasks.store.whole_file import write_whole

FOLDER = "checked"


def changed_file(root: Path, manifest: Manifest, *, every_byte: bool = False) -> str | None:
    """Says what is wrong with the first file whose contents differ from the manifest; None if all files match.

    Files that have not changed since they were last compared are not read, unless `every_byte` is set.
    """
    return next((problem for _, problem in changed_files(root, manifest, every_byte=every_byte)), None)


def changed_files(root: Path, manifest: Manifest, *, every_byte: bool = False) -> Iterator[tuple[str, str]]:
    """Yields each file whose contents differ from the manifest, and what is wrong with it. Read to the end, it records
    that all files match, if they do."""
    states = _states(manifest)
    known = {} if every_byte else _read(root, manifest)
    differs = False
    for name, entry in manifest.files.items():
        problem = None
        if (state := states.get(name)) is None:
            problem = f"{name} is missing"
        elif known.get(name) != state:
            try:
                if state[0] != entry["size"] or file_sha256(manifest.path / name) != entry["sha256"]:
                    problem = f"the contents of {name} changed after it was made"
            except OSError as error:
                problem = f"{name}: {error.strerror}"
        if problem:
            differs = True
            yield name, problem
    if states != known and not differs:
        _write(root, manifest, states)


def remember(root: Path, manifest: Manifest) -> None:
    """Records that the artifact's files, as they are now, match their hashes."""
    _write(root, manifest, _states(manifest))


def forget(root: Path, manifests: Iterable[Manifest]) -> None:
    """Deletes the records about these artifacts."""
    for manifest in manifests:
        _file(root, manifest).unlink(missing_ok=True)


def _states(manifest: Manifest) -> dict[str, list[int]]:
    """Size, time of last change (ns) and inode of each file that exists."""
    states = {}
    for name in manifest.files:
        with contextlib.suppress(OSError):
            stat = (manifest.path / name).stat()
            states[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return states


def _file(root: Path, manifest: Manifest) -> Path:
    return root / FOLDER / manifest.key[:2] / f"{manifest.key}-{manifest.attempt}.json"


def _read(root: Path, manifest: Manifest) -> dict[str, Any]:
    try:
        record = json.loads(_file(root, manifest).read_bytes())
        return dict(record["files"]) if record["digest"] == manifest.digest else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def _write(root: Path, manifest: Manifest, states: dict[str, list[int]]) -> None:
    with contextlib.suppress(OSError):  # disk full or read-only: the files are compared again next time
        write_whole(_file(root, manifest), json.dumps({"digest": manifest.digest, "files": states}))
