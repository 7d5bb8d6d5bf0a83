"""Published artifacts in a bucket; a `Backend`.

    manifests/<key>/<attempt>.json         written once and last, so an artifact appears with all of its files
    files/<key>/<digest>/<name>            files; equal attempts at a key share them
    current/<recipe>-<seed>/<slot>.digest  pointers to the current artifacts
    locks/<key>                            see `tasks.store.objects.lease`
    quarantine/<key>/<attempt>.json        manifests of damaged artifacts

Two machines that publish at the same key write files under different digests or the same bytes, and their manifests
under different numbers. On this machine, everything is below `<home>/object_store/<hash of the address>/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo.errors import InputError
from tasks.store.attempt import explain_full_disk
from tasks.store.backend import Flaw, Idle
from tasks.store.local_folder import LocalFolder
from tasks.store.manifest import MANIFEST, Manifest, RemoteFiles
from tasks.store.objects.bucket import Bucket, Listed, Unreachable
from tasks.store.objects.cache import TOLD_FROM, Cache
from tasks.store.objects.lease import Lease, check_conditions, lock_records
from tasks.store.objects.manifest_index import ManifestIndex, files_of, first_wrong, number
from tasks.store.objects.object_audit import flaws, leftovers
from tasks.store.objects.upload import PARALLEL, PART, upload_file

logger = logging.getLogger(__name__)

FOLDER = "object_store"
"""Folder of the home with what this machine has of the bucket."""
PATIENCE_S = 300.0
"""Seconds for which a finished attempt waits to be published while the object store does not answer."""
PAUSE_S = 5.0
_READS = 8
_T = TypeVar("_T")


class ObjectStore(RemoteFiles):
    """Artifacts below an address `s3://BUCKET/PREFIX`. `root`: the home folder; `cache_bytes`: limit of its copies."""

    def __init__(self, root: Path, url: str, cache_bytes: int):
        self._root = root
        self._bucket = Bucket(url)
        self._folder = root / FOLDER / hashlib.sha256(self._bucket.url.encode()).hexdigest()[:12]
        self._cache = Cache(self._folder, cache_bytes, self._download)
        self._index = ManifestIndex(self._bucket, self._folder, self._placed)
        self._pointers: dict[Listed, str] = {}

    @property
    def place(self) -> str:
        return self._bucket.url

    # ---- files ----

    def url(self, manifest: Manifest) -> str:
        """Address of the artifact's files, for people."""
        return f"{self._bucket.url}/{files_of(manifest)}".rstrip("/")

    def fetch(self, manifest: Manifest, names: Collection[str]) -> None:
        """Brings these files below `manifest.path`. Raises InputError if one is missing or differs from its hash."""
        with explain_full_disk(self._root):
            if len(names) == len(manifest.files):
                self._cache.check(manifest, every_byte=False)
            else:
                self._cache.fetch(manifest, names)

    def changed(self, manifest: Manifest, *, every_byte: bool) -> str | None:
        with explain_full_disk(self._root):
            self._cache.check(manifest, every_byte=every_byte)
        return None

    def changed_here(self, manifest: Manifest) -> str | None:
        return None  # a copy that was changed is fetched again when it is read

    def _download(self, manifest: Manifest, name: str, path: Path) -> None:
        self._bucket.download(files_of(manifest) + name, path)

    # ---- manifests ----

    def newest(self, key: str) -> Manifest | None:
        attempts = sorted(self._index.attempts(key), key=number, reverse=True)
        for listed in attempts:
            manifest = self._index.read(listed)
            problem = self._wrong_sizes(manifest) if manifest is not None else None
            if manifest is not None and problem is None:
                return manifest
            if problem:
                logger.warning("ignoring the damaged artifact %s/%s: %s", self.place, listed.key, problem)
        return None

    def manifests(self, stage: str | None) -> list[Manifest]:
        with ThreadPoolExecutor(_READS) as pool:
            read = list(pool.map(self._index.read, self._index.all()))
        manifests = [manifest for manifest in read if manifest is not None and stage in (None, manifest.stage)]
        return sorted(manifests, key=lambda manifest: (manifest.created, manifest.attempt))

    def newest_by_stage(self) -> dict[str, Manifest]:
        return {manifest.stage: manifest for manifest in self.manifests(None)}

    def _placed(self, manifest: Manifest) -> Manifest:
        return dataclasses.replace(manifest, path=self._cache.folder(manifest), remote=self)

    def _wrong_sizes(self, manifest: Manifest) -> str | None:
        sizes = {listed.key: listed.size for listed in self._bucket.listing(files_of(manifest))}
        return first_wrong(manifest, sizes)

    # ---- publication and removal ----

    def publish(self, out: Path, stage: str, key: str, seal: Callable[[int], Manifest], *, forced: bool) -> Manifest:
        taken = max(map(number, self._patiently(partial(self._index.attempts, key))), default=0)
        manifest = seal(taken + 1)
        self._upload(out, manifest, again=forced)
        while True:
            body = (out / MANIFEST).read_bytes()
            name = f"manifests/{key}/{manifest.attempt}.json"
            if self._patiently(partial(self._bucket.put_if, name, body, None)) is not None:
                break
            manifest = seal(manifest.attempt + 1)  # another machine took the lock over and published first
        published = self._placed(manifest)
        self._cache.adopt(out, published)
        return published

    def _upload(self, out: Path, manifest: Manifest, *, again: bool) -> None:
        def upload(name: str) -> None:
            key, entry = files_of(manifest) + name, manifest.files[name]
            self._patiently(partial(upload_file, self._bucket, key, out / name, entry, again=again))

        size = sum(entry["size"] for entry in manifest.files.values())
        if size >= TOLD_FROM:
            logger.info("sending %.1f GB of %s %s", size / 1e9, manifest.stage, manifest.key[:12])
        small = [name for name, entry in manifest.files.items() if entry["size"] <= PART]
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(upload, small))
        for name in manifest.files.keys() - set(small):  # the parts of each go up at once
            upload(name)

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        """The answer to `ask`, which is repeated for PATIENCE_S while the object store does not answer."""
        began, told = time.monotonic(), False
        while True:
            try:
                return ask()
            except Unreachable as error:
                if time.monotonic() - began > PATIENCE_S:
                    raise
                if not told:
                    logger.warning("%s; waiting to publish", error)
                    told = True
                time.sleep(PAUSE_S)

    def remove(self, manifest: Manifest) -> None:
        self._bucket.delete([f"manifests/{manifest.key}/{manifest.attempt}.json"])
        others = [self._index.read(listed) for listed in self._index.attempts(manifest.key)]
        if manifest.digest not in {other.digest for other in others if other is not None}:
            self._bucket.delete([listed.key for listed in self._bucket.listing(files_of(manifest))])
            self._cache.forget(manifest)

    # ---- locks and pointers ----

    @contextlib.contextmanager
    def lock(self, key: str, uses: Collection[str] = (), *, wait: bool = True) -> Iterator[bool]:
        check_conditions(self._bucket, self._folder / "conditions")
        lease = Lease(self._bucket, key, self._root, uses)
        taken = lease.take(wait)
        try:
            yield taken
        finally:
            if taken:
                lease.release(attempted=wait)

    def uses(self) -> set[str]:
        elsewhere = {digest for record in lock_records(self._bucket) for digest in record.uses}
        return LocalFolder(self._root).uses() | elsewhere

    def pointers(self) -> dict[str, str]:
        def read(listed: Listed) -> str | None:
            if listed not in self._pointers:
                stored = self._bucket.get(listed.key)
                if stored is None:
                    return None
                self._pointers[listed] = stored.body.decode(errors="replace").strip()
            return self._pointers[listed]

        found = [listed for listed in self._bucket.listing("current/") if listed.key.count("/") == 2]
        with ThreadPoolExecutor(_READS) as pool:
            digests = list(pool.map(read, found))
        names = [listed.key.removeprefix("current/").removesuffix(".digest") for listed in found]
        return {name: digest for name, digest in zip(names, digests, strict=True) if digest is not None}

    def point(self, name: str, digest: str) -> None:
        self._bucket.put(f"current/{name}.digest", digest.encode())

    def unpoint(self, name: str) -> None:
        self._bucket.delete([f"current/{name}.digest"])

    def flaws(self, idle: Idle, *, every_byte: bool) -> Generator[Flaw, None, list[Manifest]]:
        return flaws(self._bucket, self._index, idle, every_byte=every_byte)

    def leftovers(self, idle: Idle) -> Iterator[Flaw]:
        return leftovers(self._bucket, self._index, idle)


def cache_bytes(gigabytes: str) -> int:
    """The limit of the copies on a machine, from the text of R1FLOW_CACHE_GB."""
    try:
        limit = float(gigabytes)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise InputError(f"R1FLOW_CACHE_GB={gigabytes}: give a number of gigabytes above 0")
    return int(limit * 1e9)
