"""Finds and repairs damaged artifacts and leftovers in a bucket. See `tasks.store.audit`."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Iterator
from functools import partial

from tasks.store.backend import Flaw, Idle
from tasks.store.manifest import FileEntry, Manifest
from tasks.store.objects.bucket import Bucket, Listed
from tasks.store.objects.manifest_index import ManifestIndex, files_of, first_wrong
from tasks.store.objects.upload import abort_upload, unfinished_uploads


def flaws(
    bucket: Bucket, index: ManifestIndex, idle: Idle, *, every_byte: bool
) -> Generator[Flaw, None, list[Manifest]]:
    """Yields damaged artifacts. Returns the manifests of the intact ones. Without `every_byte`, only names and sizes of
    files are compared."""
    found = list(index.all())  # before the files, which are there before their manifest
    sizes = {listed.key: listed.size for listed in bucket.listing("files/")}
    intact: list[Manifest] = []
    wrong: dict[str, str] = {}  # object -> what is wrong with it; attempts may share files
    for listed in found:
        manifest, problem = index.examine(listed)
        damaged: list[str] = []
        if manifest is not None and not problem:
            problem = first_wrong(manifest, sizes)
            objects = {files_of(manifest) + name: entry for name, entry in manifest.files.items()}
            damaged = [key for key, entry in objects.items() if sizes.get(key) != entry["size"]]
            if every_byte and not problem:
                damaged = [key for key, entry in objects.items() if _differs(bucket, key, entry, wrong)]
                problem = wrong[damaged[0]] if damaged else None
        if not problem and manifest is not None:
            intact.append(manifest)
        elif problem:
            repair = partial(_set_aside, bucket, idle, listed, damaged)
            yield Flaw("corrupt", f"{bucket.url}/{listed.key}", problem, repair)
    return intact


def leftovers(bucket: Bucket, index: ManifestIndex, idle: Idle) -> Iterator[Flaw]:
    """Files and parts that were uploaded for an artifact that nobody published and no attempt can continue."""
    # In this order, so that what is published meanwhile is no leftover: files, locks, manifests.
    files = list(bucket.listing("files/"))
    unfinished = list(unfinished_uploads(bucket, "files/"))
    begun = {listed.key.partition("/")[2] for listed in bucket.listing("locks/") if listed.size}
    read = [index.read(listed) for listed in index.all()]
    published = {(manifest.key, manifest.digest) for manifest in read if manifest is not None}
    lost: dict[tuple[str, str], list[str]] = {}
    for listed in files:
        if (of := _key_and_digest(listed.key)) not in published:
            lost.setdefault(of, []).append(listed.key)
    parts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, upload_id in unfinished:
        parts.setdefault(_key_and_digest(name), []).append((name, upload_id))
    for key, digest in sorted(lost.keys() | parts.keys()):
        if key in begun:  # an attempt holds the key, or was interrupted and can be continued
            continue
        of = (key, digest)
        said = "has an unfinished upload" if of in published else "was never published"
        repair = partial(_remove, bucket, index, idle, of, lost.get(of, ()), parts.get(of, ()))
        yield Flaw("orphaned", f"{bucket.url}/files/{key}/{digest}", said, repair)


def _key_and_digest(name: str) -> tuple[str, str]:
    """Those in the key of an object, `files/<key>/<digest>/<name>`."""
    _, key, digest, *_ = [*name.split("/"), "", ""]
    return key, digest


def _differs(bucket: Bucket, key: str, entry: FileEntry, wrong: dict[str, str]) -> bool:
    """Whether the contents of an object have another hash. `wrong` holds the answers."""
    if key not in wrong:
        digest = hashlib.sha256()
        try:
            for chunk in bucket.chunks(key):
                digest.update(chunk)
            same = digest.hexdigest() == entry["sha256"]
        except FileNotFoundError:
            same = False
        name = key.split("/", 3)[3]
        wrong[key] = "" if same else f"the contents of {name} changed after it was made"
    return bool(wrong[key])


def _set_aside(bucket: Bucket, idle: Idle, listed: Listed, damaged: Collection[str]) -> str:
    """Moves a manifest aside and deletes the damaged files, which the next run would otherwise take over."""
    with idle(listed.key.split("/")[1]) as free:
        if not free:  # a forced attempt may be replacing them
            return ""
        stored = bucket.get(listed.key)
        if stored is not None:
            bucket.put(listed.key.replace("manifests/", "quarantine/", 1), stored.body)
        bucket.delete([listed.key, *damaged])
    return "its manifest is set aside in quarantine/, its damaged files are deleted"


def _remove(
    bucket: Bucket,
    index: ManifestIndex,
    idle: Idle,
    of: tuple[str, str],
    objects: Collection[str],
    parts: Iterable[tuple[str, str]],
) -> str:
    key, digest = of
    with idle(key) as free:
        if not free:
            return ""
        attempts = [index.read(listed) for listed in index.attempts(key)]
        if digest not in {manifest.digest for manifest in attempts if manifest is not None}:
            bucket.delete(objects)
        for name, upload_id in parts:
            abort_upload(bucket, name, upload_id)
    return "removed"
