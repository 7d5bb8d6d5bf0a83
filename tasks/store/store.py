"""The artifact store: what a stage made, under a key that says what it was made from.

    <root>/artifacts/<stage>/<key>/<attempt>/   published: files and manifest.json, never written again
    <root>/work/<stage>-<key[:16]>/             an attempt under way: attempt.json, out/, state/
    <root>/locks/<key>.lock                     held by whoever works on the key

An artifact appears by one rename, so a reader sees all of it or nothing. The store is the truth about what exists:
it is checked against the files each time, unlike a cache that remembers only that it once wrote them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.errors import InputError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_LOCK_POLL_S = 0.2
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def artifact_key(stage: str, version: int, config: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """The key of what `stage` makes from `config` and `inputs` (name -> digest); equal keys mean equal work."""
    parts = {"stage": stage, "version": version, "config": dict(config), "inputs": dict(inputs)}
    return hashlib.sha256(_canonical(parts).encode()).hexdigest()


@dataclass(frozen=True)
class InputRef:
    """One input of a stage: its digest, and where it came from (an earlier artifact or a path of the user's)."""

    digest: str
    stage: str | None = None
    key: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What an artifact is: the only thing that travels between stages.

    `digest` covers the key and the contents, so equal contents under two keys never share a digest. `files` maps
    a relative path to ``{"size": bytes, "sha256": hex}``. A metric that is not finite is stored as None.
    `tokenizer_sha256` covers the tokenizer files and chat template in the artifact, wherever in it they lie.
    """

    stage: str
    stage_version: int
    key: str
    digest: str
    attempt: int
    created: str
    seconds: float
    config: dict[str, Any]
    inputs: dict[str, InputRef]
    files: dict[str, dict[str, Any]]
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    steps_completed: int | None = None
    tokenizer_sha256: str | None = None
    mlflow_run_id: str | None = None
    path: Path = field(default=Path(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `path` stays behind, because it is true only on this machine."""
        values = dataclasses.asdict(self)
        del values["path"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: Path = Path()) -> Manifest:
        inputs = {name: InputRef(**ref) for name, ref in values["inputs"].items()}
        return cls(**{**values, "inputs": inputs, "path": path})

    @property
    def ref(self) -> InputRef:
        """This artifact as the input of a later stage."""
        return InputRef(self.digest, stage=self.stage, key=self.key)


class Store:
    """The artifacts below one folder. Any number of processes may read and write it at once."""

    def __init__(self, root: Path):
        self.root = root

    def find(self, key: str) -> Manifest | None:
        """The newest complete attempt at `key`; one that lost files is passed over with a warning."""
        folders = [path for path in self.root.glob(f"artifacts/*/{key}/*") if path.name.isdecimal()]
        for folder in sorted(folders, key=lambda path: int(path.name), reverse=True):
            if manifest := _read(folder):
                return manifest
        return None

    def resolve(self, ref: str) -> Manifest:
        """The artifact that a user means by a key or digest (6 or more of its first characters) or `latest:<stage>`."""
        known = self.list()
        if ref.startswith("latest:"):
            stage = ref.removeprefix("latest:")
            of_stage = [manifest for manifest in known if manifest.stage == stage]
            if not of_stage:
                stages = ", ".join(sorted({manifest.stage for manifest in known})) or "none"
                raise InputError(
                    f"{ref}: no artifact of stage {stage!r} in {self.root}; run it first, or take another; stages that "
                    f"have one: {stages}"
                )
            return of_stage[-1]
        if not re.fullmatch("[0-9a-f]{6,64}", ref):
            raise InputError(f"{ref!r}: give 6 or more hex characters of a key or digest, or latest:<stage>")
        # One entry per key: a key stands for its newest attempt, and `known` lists the newest last.
        matches = {m.key: m for m in known if m.key.startswith(ref) or m.digest.startswith(ref)}
        if not matches:
            raise InputError(f"{ref}: no artifact in {self.root} has this key or digest; `r1 stages` lists them")
        if len(matches) > 1:
            names = ", ".join(f"{m.stage} {m.digest[: len(ref) + 4]}" for m in matches.values())
            raise InputError(f"{ref}: stands for {len(matches)} artifacts ({names}); give more characters")
        return next(iter(matches.values()))

    def verify(self, manifest: Manifest) -> None:
        """Read every byte of the artifact and compare; raises InputError on the first difference."""
        for name, entry in manifest.files.items():
            path = manifest.path / name
            if not path.is_file():
                raise InputError(f"{path}: file is missing; run stage {manifest.stage!r} again with force")
            if _sha256(path) != entry["sha256"]:
                raise InputError(f"{path}: contents changed; run stage {manifest.stage!r} again with force")
        if _digest(manifest.key, manifest.files) != manifest.digest:
            raise InputError(f"{manifest.path / MANIFEST}: was edited; run stage {manifest.stage!r} again with force")

    @contextlib.contextmanager
    def attempt(self, stage: str, key: str, *, force: bool = False) -> Iterator[Attempt]:
        """Hold the lock of `key` and give a place to work that an earlier, killed attempt may have begun.

        The caller asks `find` again inside: another process may have published while this one waited. Work is
        kept unless it is published. `force` begins afresh, except where it continues a forced attempt.
        """
        with self._space(), self._lock(key) as lock_fd:
            attempt = Attempt(self, stage, key, lock_fd)
            attempt._open(force)
            try:
                yield attempt
            finally:
                attempt._close()

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[int]:
        path = self.root / "locks" / f"{key}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file is never removed: a waiter would go on to lock a file that nobody else can see.
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except PermissionError:
            raise InputError(f"{self.root}: may not be written; set R1FLOW_HOME to a folder that may") from None
        try:
            waiting = False
            while True:  # polled rather than blocking in C, so that a cancelled thread can leave
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        holder = path.read_text(errors="replace").strip() or "another process"
                        logger.warning("waiting for the lock of artifact %s, held by %s", key[:16], holder)
                        waiting = True
                    time.sleep(_LOCK_POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode(), 0)
            # Inherited by a trainer, the lock is free only when both are gone: nobody else writes beside it.
            os.set_inheritable(fd, True)
            try:
                yield fd
            finally:
                os.ftruncate(fd, 0)  # a lock that was given back names nobody; see is_abandoned
        finally:
            os.close(fd)

    def is_abandoned(self, key: str, since: datetime) -> bool:
        """Whether a process of this host took the lock of `key` after `since` and died with it.

        Of other hosts nothing is said: not every shared file system shares its locks.
        """
        path = self.root / "locks" / f"{key}.lock"
        try:
            with path.open("rb") as file:
                # The holder may have inherited it to a trainer that outlives it: what counts is the lock.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                holder = re.fullmatch(r"process \d+ on (.+) since (\S+)", file.read().decode(errors="replace").strip())
        except (FileNotFoundError, BlockingIOError):
            return False
        if holder is None or holder[1] != socket.gethostname():
            return False
        return datetime.fromisoformat(holder[2]) >= since

    @contextlib.contextmanager
    def _space(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"no space left on {self.root}: free some or move the home folder with R1FLOW_HOME"
            raise InputError(message) from error

    def list(self) -> list[Manifest]:
        """Every complete artifact, oldest first."""
        folders = [path.parent for path in self.root.glob(f"artifacts/*/*/*/{MANIFEST}")]
        manifests = [manifest for folder in folders if (manifest := _read(folder))]
        return sorted(manifests, key=lambda manifest: (manifest.created, manifest.attempt))


class Attempt:
    """One attempt at a key, while its lock is held.

    `out` is what will be published. `state` is what the attempt needs to go on after a kill (checkpoints); it is
    removed at publication. `lock_fd` can be passed to a subprocess, which then holds the lock too.
    """

    def __init__(self, store: Store, stage: str, key: str, lock_fd: int):
        self.stage = stage
        self.key = key
        self.lock_fd = lock_fd
        self.work = store.root / "work" / f"{stage}-{key[:16]}"
        self.out = self.work / "out"
        self.state = self.work / "state"
        self._store = store
        self._began = time.monotonic()

    def _open(self, force: bool) -> None:
        record = self.work / "attempt.json"
        try:
            forced = json.loads(record.read_text())["forced"]
        except (OSError, ValueError, KeyError, TypeError):
            forced = None
        # Without out/ the earlier attempt was killed after its rename: it published, what is left here is refuse.
        if forced is None or not self.out.is_dir() or (force and not forced):
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True, exist_ok=True)
            _write(record, {"stage": self.stage, "key": self.key, "forced": force, "began": _now()})
        else:
            logger.info("continuing what an earlier attempt left in %s", self.work)
        self.out.mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True)

    def _close(self) -> None:
        untouched = self.out.is_dir() and not any(self.out.iterdir()) and not any(self.state.iterdir())
        if untouched:  # the caller found the artifact already published, or failed before it made anything
            shutil.rmtree(self.work, ignore_errors=True)

    def publish(
        self,
        *,
        stage_version: int,
        config: Mapping[str, Any],
        inputs: Mapping[str, InputRef] | None = None,
        counts: Mapping[str, int] | None = None,
        metrics: Mapping[str, float] | None = None,
        steps_completed: int | None = None,
        mlflow_run_id: str | None = None,
        seconds: float | None = None,
    ) -> Manifest:
        """Make `out` an artifact. `seconds` defaults to the time since this attempt took the lock.

        All of it is on disk before the rename that makes it visible, so neither a kill nor a power cut leaves an
        artifact with half its contents.
        """
        inputs = dict(inputs or {})
        expected = artifact_key(self.stage, stage_version, config, {name: ref.digest for name, ref in inputs.items()})
        assert expected == self.key, f"{self.stage}: published with another config or inputs than its key was made of"
        manifest_path = self.out / MANIFEST
        with self._store._space():
            manifest_path.unlink(missing_ok=True)  # of a publication that was killed before its rename
            files = _inventory(self.out)
            seconds = time.monotonic() - self._began if seconds is None else seconds
            manifest = Manifest(
                stage=self.stage,
                stage_version=stage_version,
                key=self.key,
                digest=_digest(self.key, files),
                attempt=self._next_number(),
                created=_now(),
                seconds=round(seconds, 3),
                config=json.loads(_canonical(dict(config))),
                inputs=inputs,
                files=files,
                counts=dict(counts or {}),
                metrics={k: float(v) if math.isfinite(v) else None for k, v in (metrics or {}).items()},
                steps_completed=steps_completed,
                tokenizer_sha256=_tokenizer_sha256(files),
                mlflow_run_id=mlflow_run_id,
            )
            _write(manifest_path, manifest.to_dict())
            for folder, _, _ in os.walk(self.out):
                _fsync(Path(folder))
            target = self._store.root / "artifacts" / self.stage / self.key / str(manifest.attempt)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.out, target)
            for folder_path in (target.parent, target.parent.parent, target.parent.parent.parent):
                _fsync(folder_path)
        shutil.rmtree(self.work, ignore_errors=True)
        return dataclasses.replace(manifest, path=target)

    def _next_number(self) -> int:
        taken = self._store.root.glob(f"artifacts/{self.stage}/{self.key}/*")
        return 1 + max((int(path.name) for path in taken if path.name.isdecimal()), default=0)


def _read(folder: Path) -> Manifest | None:
    """The manifest in `folder` if the artifact is whole as far as names and sizes tell."""
    try:
        manifest = Manifest.from_dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")), folder)
        if folder.parts[-3:] != (manifest.stage, manifest.key, str(manifest.attempt)):
            raise ValueError("the manifest belongs to another artifact")
        for name, entry in manifest.files.items():
            if (size := (folder / name).stat().st_size) != entry["size"]:
                raise ValueError(f"{name} has {size} bytes instead of {entry['size']}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("ignoring the damaged artifact %s: %s", folder, error)
        return None
    return manifest


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of each file below `folder`, each of them on disk afterwards."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"{path}: an artifact may not hold links; copy the file instead")
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
            _fsync(path)
    return files


def _digest(key: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    hashes = sorted((name, entry["sha256"]) for name, entry in files.items())
    return hashlib.sha256(_canonical([key, hashes]).encode()).hexdigest()


def _tokenizer_sha256(files: Mapping[str, Mapping[str, Any]]) -> str | None:
    # By base name: the same tokenizer in two folders, or in two artifacts with other layouts, is one tokenizer.
    found = {(Path(name).name, entry["sha256"]) for name, entry in files.items() if Path(name).name in _TOKENIZER_FILES}
    return hashlib.sha256(_canonical(sorted(found)).encode()).hexdigest() if found else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, allow_nan=False, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _now() -> str:
    return datetime.now(UTC).isoformat()
