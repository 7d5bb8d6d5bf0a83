"""A machine's copies of artifacts from an object store: compared with their hashes on arrival, bounded in size.

    <root>/files/<digest[:16]>/<stage>/<key>/<attempt>/<name>
    <root>/locks/<digest[:16]>.use     locked by every process that has used the artifact, until the process ends
    <root>/locks/<digest[:16]>.fill    locked while files are added

The artifact that was not used for the longest time is removed first, and never one that a live process has used. A
kill leaves partial downloads and half-removed copies in <root>/removed, which later downloads remove.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo.errors import InputError
from tasks.store.checks import changed_files, forget, remember
from tasks.store.manifest import Manifest, file_sha256

logger = logging.getLogger(__name__)

DOWNLOADS = 8
"""Files that are fetched at once."""
TOLD_FROM = 100_000_000
"""Bytes from which the log says that files are fetched or sent."""

Download = Callable[[Manifest, str, Path], None]
"""Writes one file of an artifact to a path. Raises FileNotFoundError if the object store does not have it."""


class Cache:
    """Copies of artifacts below one folder, of up to `limit` bytes unless live processes use more."""

    def __init__(self, root: Path, limit: int, download: Download):
        self.root, self._limit, self._download = root, limit, download
        self._used: dict[str, int] = {}  # digest -> descriptor of its locked file, open until this process ends
        self._using = threading.Lock()

    def folder(self, manifest: Manifest) -> Path:
        """The folder of an artifact's files, which need not be there."""
        return self.root / "files" / manifest.digest[:16] / manifest.stage / manifest.key / str(manifest.attempt)

    def fetch(self, manifest: Manifest, names: Collection[str]) -> None:
        """Brings the files that are not here.

        Raises:
            InputError: the object store does not have a file, or sends other contents than the manifest says.
        """
        self._use(manifest)
        if not self._absent(manifest, names):
            return
        with self._locked(manifest, "fill"):
            absent = self._absent(manifest, names)
            size = sum(manifest.files[name]["size"] for name in absent)
            if size >= TOLD_FROM:
                logger.info("fetching %.1f GB of %s %s", size / 1e9, manifest.stage, manifest.key[:12])
            self._make_room(size)
            for name in absent:
                _remove_partial(manifest.path / name)
            with ThreadPoolExecutor(DOWNLOADS) as pool:
                list(pool.map(lambda name: self._bring(manifest, name), absent))
            if len(absent) == len(manifest.files):
                remember(self.root, manifest)  # all were compared just now

    def check(self, manifest: Manifest, *, every_byte: bool) -> None:
        """Brings all files that are not here, or whose copies here were changed. Raises as `fetch`."""
        self.fetch(manifest, manifest.files)
        if changed := [name for name, _ in changed_files(self.root, manifest, every_byte=every_byte)]:
            for name in changed:
                (manifest.path / name).unlink(missing_ok=True)
            self.fetch(manifest, changed)
            remember(self.root, manifest)  # compared on arrival

    def adopt(self, out: Path, manifest: Manifest) -> None:
        """Moves a folder that was just published here, so that this machine need not fetch it."""
        self._use(manifest)
        with self._locked(manifest, "fill"):
            self._make_room(sum(entry["size"] for entry in manifest.files.values()))
            target = self.folder(manifest)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            out.rename(target)
        remember(self.root, dataclasses.replace(manifest, path=target))

    def forget(self, manifest: Manifest) -> None:
        """Removes the copy of an artifact that is gone, unless a live process uses it."""
        self._remove(manifest.digest[:16])
        forget(self.root, [manifest])

    def _absent(self, manifest: Manifest, names: Collection[str]) -> list[str]:
        absent = []
        for name in names:
            try:
                if (manifest.path / name).stat().st_size == manifest.files[name]["size"]:
                    continue
            except OSError:
                pass
            absent.append(name)
        return absent

    def _bring(self, manifest: Manifest, name: str) -> None:
        target = manifest.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        location = f"{manifest.location}/{name}"
        try:
            for _ in range(2):  # what was damaged on its way arrives well the second time
                self._download(manifest, name, partial)
                if file_sha256(partial) == manifest.files[name]["sha256"]:
                    partial.replace(target)
                    return
        except FileNotFoundError:
            raise InputError(_damaged(manifest, f"{location} is missing")) from None
        finally:
            partial.unlink(missing_ok=True)
        raise InputError(_damaged(manifest, f"the contents of {location} are not those that were published"))

    def _make_room(self, size: int) -> None:
        """Removes artifacts that no live process uses until `size` more bytes fit, those used longest ago first."""
        for killed in self.root.glob("removed/*"):
            shutil.rmtree(killed, ignore_errors=True)
        sizes = {folder.name: _size(folder) for folder in self.root.glob("files/*/")}
        left = sum(sizes.values())
        for name in sorted(sizes, key=lambda name: _mtime(self._lock_file(name, "use"))):
            if left + size <= self._limit:
                return
            if self._remove(name):
                left -= sizes[name]

    def _remove(self, name: str) -> bool:
        """Removes the copies with this beginning of a digest. Returns False if a live process uses them."""
        folder = self.root / "files" / name
        file = self._lock_file(name, "use")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            target = self.root / "removed" / f"{name}.{os.getpid()}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(target)
        shutil.rmtree(target, ignore_errors=True)
        return True

    def _use(self, manifest: Manifest) -> None:
        """Keeps the artifact's copies until this process ends."""
        file = self._lock_file(manifest.digest[:16], "use")
        with self._using:
            if manifest.digest not in self._used:
                file.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                self._used[manifest.digest] = descriptor
        os.utime(file)

    @contextlib.contextmanager
    def _locked(self, manifest: Manifest, what: str) -> Iterator[None]:
        with self._lock_file(manifest.digest[:16], what).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_file(self, name: str, what: str) -> Path:
        return self.root / "locks" / f"{name}.{what}"


def _remove_partial(target: Path) -> None:
    """Removes what killed downloads of a file left: its partial copy, and those that boto3 writes beside that one."""
    for partial in target.parent.glob(f".{glob.escape(target.name)}.partial*"):
        partial.unlink(missing_ok=True)


def _damaged(manifest: Manifest, problem: str) -> str:
    return (
        f"damaged: {problem}; `r1 verify --repair` removes the artifact, and the next run makes it again, as does "
        f"`--force {manifest.stage}`"
    )


def _size(folder: Path) -> int:
    """Bytes of the files below a folder. Those that another process renames or removes meanwhile do not count."""
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(path, name)).st_size
    return size


def _mtime(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
