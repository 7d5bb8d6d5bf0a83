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
import json
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo.errors import InputError
from tasks.store.attempt import explain_full_disk
from tasks.store.backend import Flaw, Idle
from tasks.store.local_folder import LocalFolder
from tasks.store.manifest import MANIFEST, FileEntry, Manifest, RemoteFiles, parse, trusted
from tasks.store.objects.bucket import Bucket, Listed, Unreachable
from tasks.store.objects.cache import Cache
from tasks.store.objects.lease import Lease, check_conditions, lock_records
from tasks.store.objects.upload import PARALLEL, PART, abort_upload, unfinished_uploads, upload_file
from tasks.store.whole_file import write_whole

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
        self._manifests: dict[Listed, Manifest] = {}
        self._pointers: dict[Listed, str] = {}

    @property
    def place(self) -> str:
        return self._bucket.url

    # ---- files ----

    def url(self, manifest: Manifest) -> str:
        """Address of the artifact's files, for people."""
        return f"{self._bucket.url}/{_files(manifest)}".rstrip("/")

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
        self._bucket.download(_files(manifest) + name, path)

    # ---- manifests ----

    def newest(self, key: str) -> Manifest | None:
        attempts = sorted(self._attempts(key), key=_number, reverse=True)
        for listed in attempts:
            manifest = self._read(listed)
            problem = self._wrong_sizes(manifest) if manifest is not None else None
            if manifest is not None and problem is None:
                return manifest
            if problem:
                logger.warning("ignoring the damaged artifact %s/%s: %s", self.place, listed.key, problem)
        return None

    def manifests(self, stage: str | None) -> list[Manifest]:
        with ThreadPoolExecutor(_READS) as pool:
            read = list(pool.map(self._read, self._all_manifests()))
        manifests = [manifest for manifest in read if manifest is not None and stage in (None, manifest.stage)]
        return sorted(manifests, key=lambda manifest: (manifest.created, manifest.attempt))

    def _all_manifests(self) -> Iterator[Listed]:
        return (listed for listed in self._bucket.listing("manifests/") if _number(listed))

    def _attempts(self, key: str) -> list[Listed]:
        return [listed for listed in self._bucket.listing(f"manifests/{key}/") if _number(listed)]

    def _read(self, listed: Listed) -> Manifest | None:
        """A manifest, from this machine if it was read before. None, with a warning, if it is damaged."""
        manifest, problem = self._examine(listed)
        if problem:
            logger.warning("ignoring the damaged artifact %s/%s: %s", self.place, listed.key, problem)
            return None
        return manifest

    def _examine(self, listed: Listed) -> tuple[Manifest | None, str | None]:
        """A manifest (None if it cannot be read, or is gone), and what is wrong with it."""
        if listed in self._manifests:
            return self._manifests[listed], None
        _, key, name = listed.key.split("/")
        etag = hashlib.sha256(listed.etag.encode()).hexdigest()[:16]
        copy = self._folder / "manifests" / key[:2] / f"{key}-{name.removesuffix('.json')}.{etag}.json"
        manifest = None
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            manifest = self._placed(trusted(copy.read_bytes(), Path()))
        if manifest is None:
            stored = self._bucket.get(listed.key)
            if stored is None:  # pruned since it was listed
                return None, None
            manifest, problem = parse(stored.body, Path(_stage_in(stored.body), key, name.removesuffix(".json")))
            if manifest is not None and not problem and not _is_safe(manifest):
                problem = "it names files outside of its folder"
            if manifest is None or problem:
                return manifest, problem
            manifest = self._placed(manifest)
            with contextlib.suppress(OSError):  # disk full or read-only: it is fetched again next time
                write_whole(copy, stored.body.decode())
        self._manifests[listed] = manifest
        return manifest, None

    def _placed(self, manifest: Manifest) -> Manifest:
        return dataclasses.replace(manifest, path=self._cache.folder(manifest), remote=self)

    def _wrong_sizes(self, manifest: Manifest) -> str | None:
        sizes = {listed.key: listed.size for listed in self._bucket.listing(_files(manifest))}
        return _first_wrong(manifest, sizes)

    # ---- publication and removal ----

    def publish(self, out: Path, stage: str, key: str, seal: Callable[[int], Manifest], *, forced: bool) -> Manifest:
        taken = max(map(_number, self._patiently(partial(self._attempts, key))), default=0)
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
            key, entry = _files(manifest) + name, manifest.files[name]
            self._patiently(partial(upload_file, self._bucket, key, out / name, entry, again=again))

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
        others = [self._read(listed) for listed in self._attempts(manifest.key)]
        if manifest.digest not in {other.digest for other in others if other is not None}:
            self._bucket.delete([listed.key for listed in self._bucket.listing(_files(manifest))])
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

    # ---- checks ----

    def flaws(self, *, every_byte: bool) -> Generator[Flaw, None, list[Manifest]]:
        sizes = {listed.key: listed.size for listed in self._bucket.listing("files/")}
        intact: list[Manifest] = []
        wrong: dict[str, str] = {}  # object -> what is wrong with it; attempts may share files
        for listed in self._all_manifests():
            manifest, problem = self._examine(listed)
            damaged: list[str] = []
            if manifest is not None and not problem:
                problem = _first_wrong(manifest, sizes)
                objects = {_files(manifest) + name: entry for name, entry in manifest.files.items()}
                damaged = [key for key, entry in objects.items() if sizes.get(key) != entry["size"]]
                if every_byte and not problem:
                    damaged = [key for key, entry in objects.items() if self._differs(key, entry, wrong)]
                    problem = wrong[damaged[0]] if damaged else None
            if not problem and manifest is not None:
                intact.append(manifest)
            elif problem:
                yield Flaw("corrupt", f"{self.place}/{listed.key}", problem, partial(self._repair, listed, damaged))
        return intact

    def _differs(self, key: str, entry: FileEntry, wrong: dict[str, str]) -> bool:
        if key not in wrong:
            digest = hashlib.sha256()
            try:
                for chunk in self._bucket.chunks(key):
                    digest.update(chunk)
                same = digest.hexdigest() == entry["sha256"]
            except FileNotFoundError:
                same = False
            name = key.split("/", 3)[3]
            wrong[key] = "" if same else f"the contents of {name} changed after it was made"
        return bool(wrong[key])

    def _repair(self, listed: Listed, damaged: Collection[str]) -> str:
        """Moves a manifest aside and deletes the damaged files, which the next run would otherwise take over."""
        stored = self._bucket.get(listed.key)
        if stored is not None:
            aside = listed.key.replace("manifests/", "quarantine/", 1)
            self._bucket.put(aside, stored.body)
        self._bucket.delete([listed.key, *damaged])
        return "its manifest is set aside in quarantine/, its damaged files are deleted"

    def leftovers(self, idle: Idle) -> Iterator[Flaw]:
        """Files and parts that were uploaded for an artifact that nobody published and no attempt can continue."""
        published = {(m.key, m.digest) for m in self.manifests(None)}
        lost: dict[tuple[str, str], list[str]] = {}
        for listed in self._bucket.listing("files/"):
            _, key, digest, *_ = [*listed.key.split("/"), ""]
            if (key, digest) not in published:
                lost.setdefault((key, digest), []).append(listed.key)
        parts: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for name, upload_id in unfinished_uploads(self._bucket, "files/"):
            _, key, digest, *_ = [*name.split("/"), ""]
            parts.setdefault((key, digest), []).append((name, upload_id))
        begun = {listed.key.partition("/")[2] for listed in self._bucket.listing("locks/") if listed.size}
        for key, digest in sorted(lost.keys() | parts.keys()):
            if key in begun:  # an attempt holds the key, or was interrupted and can be continued
                continue
            of = (key, digest)
            remove = partial(self._remove_lost, idle, key, lost.get(of, ()), parts.get(of, ()))
            yield Flaw("orphaned", f"{self.place}/files/{key}/{digest}", "was never published", remove)

    def _remove_lost(self, idle: Idle, key: str, objects: Collection[str], parts: Iterable[tuple[str, str]]) -> str:
        with idle(key) as free:
            if not free:
                return ""
            self._bucket.delete(objects)
            for name, upload_id in parts:
                abort_upload(self._bucket, name, upload_id)
        return "removed"


def cache_bytes(gigabytes: str) -> int:
    """The limit of the copies on a machine, from the text of R1FLOW_CACHE_GB."""
    try:
        limit = float(gigabytes)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise InputError(f"R1FLOW_CACHE_GB={gigabytes}: give a number of gigabytes above 0")
    return int(limit * 1e9)


def _stage_in(text: bytes) -> str:
    """The stage that a manifest names, which is not in the name of its object."""
    try:
        return str(json.loads(text)["stage"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _is_safe(manifest: Manifest) -> bool:
    """Whether the files stay inside of the artifact's folder. Whoever may write to the bucket could name others."""
    paths = [Path(manifest.stage), *map(Path, manifest.files)]
    return len(paths[0].parts) == 1 and not any(path.is_absolute() or ".." in path.parts for path in paths)


def _files(manifest: Manifest) -> str:
    return f"files/{manifest.key}/{manifest.digest}/"


def _first_wrong(manifest: Manifest, sizes: dict[str, int]) -> str | None:
    """What is wrong with the sizes (object -> bytes) of an artifact's files; None if nothing is."""
    for name, entry in manifest.files.items():
        size = sizes.get(_files(manifest) + name)
        if size is None:
            return f"{name} is missing"
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    return None


def _number(listed: Listed) -> int:
    """The attempt's number in a manifest's key `manifests/<key>/<attempt>.json`; 0 if it is something else."""
    parts = listed.key.split("/")
    name = parts[-1].removesuffix(".json")
    return int(name) if len(parts) == 3 and parts[-1].endswith(".json") and name.isdecimal() else 0
