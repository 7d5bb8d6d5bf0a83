"""Published artifacts in a local folder, or one that machines share.

    <root>/artifacts/<stage>/<key>/<attempt>/            files and manifest.json, never written again
    <root>/current/<recipe>-<seed>/<slot>.digest         pointers to the current artifacts
    <root>/quarantine/, <root>/removed/                  damaged artifacts that were set aside; what is being deleted

An artifact appears through one rename, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from pathlib import Path

from tasks.store.backend import Flaw, Idle
from tasks.store.checks import changed_file, forget, remember
from tasks.store.listing import newest_by_stage, read_manifests
from tasks.store.manifest import Manifest, examine, fsync, read_manifest
from tasks.store.whole_file import write_whole

QUARANTINE = "quarantine"
"""Folder of the store for damaged artifacts that were moved aside. `r1 prune` empties it."""
REMOVED = "removed"
"""Folder of the store for what is being deleted. One rename moves an artifact here, so it disappears at once."""
_CURRENT, _SUFFIX = "current", "digest"


class LocalFolder:
    """Artifacts below one folder; a `Backend`."""

    def __init__(self, root: Path):
        self.root = root

    @property
    def place(self) -> str:
        return str(self.root)

    def newest(self, key: str) -> Manifest | None:
        folders = [path for path in self.root.glob(f"artifacts/*/{key}/*") if path.name.isdecimal()]
        newest_first = sorted(folders, key=lambda path: int(path.name), reverse=True)
        return next((manifest for folder in newest_first if (manifest := read_manifest(folder))), None)

    def manifests(self, stage: str | None) -> list[Manifest]:
        return read_manifests(self.root, stage)

    def newest_by_stage(self) -> dict[str, Manifest]:
        return newest_by_stage(self.root)

    def changed(self, manifest: Manifest, *, every_byte: bool) -> str | None:
        return changed_file(self.root, manifest, every_byte=every_byte)

    def changed_here(self, manifest: Manifest) -> str | None:
        return changed_file(self.root, manifest)

    def publish(self, out: Path, stage: str, key: str, seal: Callable[[int], Manifest], *, forced: bool) -> Manifest:
        attempts = self.root.glob(f"artifacts/{stage}/{key}/*")
        manifest = seal(1 + max((int(path.name) for path in attempts if path.name.isdecimal()), default=0))
        for folder, _, _ in os.walk(out):
            fsync(Path(folder))
        target = self.root / "artifacts" / stage / key / str(manifest.attempt)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(out, target)
        for folder_path in (target.parent, target.parent.parent, target.parent.parent.parent):
            fsync(folder_path)
        published = dataclasses.replace(manifest, path=target)
        remember(self.root, published)
        return published

    def remove(self, manifest: Manifest) -> None:
        target = self.root / REMOVED / f"{manifest.key}-{manifest.attempt}.{os.getpid()}"
        target.parent.mkdir(exist_ok=True)
        manifest.path.rename(target)
        forget(self.root, [manifest])
        if not any(manifest.path.parent.iterdir()):
            manifest.path.parent.rmdir()
        shutil.rmtree(target, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, key: str, uses: Collection[str] = (), *, wait: bool = True) -> Iterator[bool]:
        yield True  # the lock files of `Store` are in the same folder, and hold for all who see it

    def uses(self) -> set[str]:
        digests: set[str] = set()
        for path in self.root.glob("work/*/attempt.json"):
            try:
                digests |= set(map(str, json.loads(path.read_bytes()).get("uses", ())))
            except (OSError, ValueError, AttributeError, TypeError, RecursionError):
                continue
        return digests

    def pointers(self) -> dict[str, str]:
        files = sorted(self.root.glob(f"{_CURRENT}/*-*/*.{_SUFFIX}"))
        # A damaged file gives a digest that matches no artifact.
        texts = {file: file.read_text(encoding="utf-8", errors="replace").strip() for file in files}
        return {f"{file.parent.name}/{file.stem}": digest for file, digest in texts.items()}

    def point(self, name: str, digest: str) -> None:
        write_whole(self._pointer(name), digest)

    def unpoint(self, name: str) -> None:
        self._pointer(name).unlink(missing_ok=True)

    def _pointer(self, name: str) -> Path:
        return self.root / _CURRENT / f"{name}.{_SUFFIX}"

    def flaws(self, idle: Idle, *, every_byte: bool) -> Generator[Flaw, None, list[Manifest]]:
        intact: list[Manifest] = []
        for folder in sorted(self.root.glob("artifacts/*/*/*/")):
            manifest, problem = examine(folder)
            if manifest is not None and not problem:
                problem = changed_file(self.root, manifest, every_byte=every_byte)
            if not problem and manifest is not None:
                intact.append(manifest)
            elif folder.exists():  # not pruned in the meantime
                yield Flaw("corrupt", self._name(folder), problem or "", partial(self._set_aside, folder))
        return intact

    def leftovers(self, idle: Idle) -> Iterator[Flaw]:
        return iter(())

    def _set_aside(self, folder: Path) -> str:
        target = self.root / QUARANTINE / folder.relative_to(self.root / "artifacts")
        number = 0
        while (new := target.with_name(f"{target.name}.{number}")).exists():
            number += 1
        new.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(new)
        return f"set aside in {self._name(new)}"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
