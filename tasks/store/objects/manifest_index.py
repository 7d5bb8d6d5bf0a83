"""Manifests in a bucket: each is fetched once and kept on this machine, because it is never written again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tasks.store.manifest import Manifest, parse, trusted
from tasks.store.objects.bucket import Bucket, Listed
from tasks.store.whole_file import write_whole

logger = logging.getLogger(__name__)


class ManifestIndex:
    """The manifests below `manifests/<key>/<attempt>.json`. Copies are in `folder`. `placed` adds where the files
    are."""

    def __init__(self, bucket: Bucket, folder: Path, placed: Callable[[Manifest], Manifest]):
        self._bucket, self._folder, self._placed = bucket, folder, placed
        self._known: dict[Listed, Manifest] = {}

    def all(self) -> Iterator[Listed]:
        """The objects of all manifests."""
        return (listed for listed in self._bucket.listing("manifests/") if number(listed))

    def attempts(self, key: str) -> list[Listed]:
        """The objects of the manifests at one key."""
        return [listed for listed in self._bucket.listing(f"manifests/{key}/") if number(listed)]

    def read(self, listed: Listed) -> Manifest | None:
        """A manifest, from this machine if it was read before. None, with a warning, if it is damaged."""
        manifest, problem = self.examine(listed)
        if problem:
            logger.warning("ignoring the damaged artifact %s/%s: %s", self._bucket.url, listed.key, problem)
            return None
        return manifest

    def examine(self, listed: Listed) -> tuple[Manifest | None, str | None]:
        """A manifest (None if it cannot be read, or is gone), and what is wrong with it."""
        if listed in self._known:
            return self._known[listed], None
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
        self._known[listed] = manifest
        return manifest, None


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


def files_of(manifest: Manifest) -> str:
    """Beginning of the keys of an artifact's files."""
    return f"files/{manifest.key}/{manifest.digest}/"


def first_wrong(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with the sizes (object -> bytes) of an artifact's files; None if nothing is."""
    for name, entry in manifest.files.items():
        size = sizes.get(files_of(manifest) + name)
        if size is None:
            return f"{name} is missing"
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    return None


def number(listed: Listed) -> int:
    """The attempt's number in a manifest's key `manifests/<key>/<attempt>.json`; 0 if it is something else."""
    parts = listed.key.split("/")
    name = parts[-1].removesuffix(".json")
    return int(name) if len(parts) == 3 and parts[-1].endswith(".json") and name.isdecimal() else 0
