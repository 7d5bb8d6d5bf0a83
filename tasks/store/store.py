"""The artifact store: each stage's output, under a key computed from what it was made from.

    <root>/work/<stage>-<key[:16]>/   an attempt in progress: attempt.json, out/, state/
    <root>/locks/<key>.lock           held by the process that works on the key

Published artifacts are in a backend, by default in the same folder: see `tasks.store.local_folder`. A reader sees all
of an artifact or nothing. The store is the source of truth about which artifacts exist: every look-up checks the files
themselves, and `tasks.store.checks` says when it reads their contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

from grpo.errors import InputError
from tasks.store.attempt import Attempt, explain_full_disk, utc_now
from tasks.store.backend import Backend
from tasks.store.local_folder import LocalFolder
from tasks.store.manifest import Manifest

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.2
_KEYS: dict[str, str] = {}  # digest -> key of the artifacts that this process has listed, in any store


class Store:
    """Artifacts, and attempts below the local folder `root`. Any number of processes can read and write it at the same
    time. `backend` holds the published artifacts, by default in the same folder."""

    def __init__(self, root: Path, backend: Backend | None = None):
        self.root = root
        self.backend: Backend = LocalFolder(root) if backend is None else backend

    def find(self, key: str, *, stage: str | None = None, compare: bool = True) -> Manifest | None:
        """The newest complete attempt at `key`. Skips, with a warning, attempts with missing files, wrong sizes or
        edited manifests. Raises InputError if the contents of a file changed, unless `compare` is off; see `check`.
        Files in an object store are compared when they are fetched.

        `stage`: the stage of the key. If nothing has the key, an artifact of this stage is taken that an earlier
        version made from the same configuration and inputs, under a key of its own; see `Manifest.key_today`."""
        manifest = self.backend.newest(key)
        if manifest is None and stage:
            earlier = [made for made in self.list(stage) if made.key_today == key != made.key]
            manifest = earlier[-1] if earlier else None
        return self.check_here(manifest) if manifest is not None and compare else manifest

    def resolve(self, ref: str) -> Manifest:
        """The artifact named by a key or digest (at least its first 6 characters) or by `latest:<stage>`. Does not
        compare the contents of its files with their hashes; see `check`.

        Raises:
            InputError: the reference is malformed, unknown or ambiguous.
        """
        if ref.startswith("latest:"):
            stage = ref.removeprefix("latest:")
            of_stage = self.list(stage) if stage and Path(stage).name == stage else []
            if not of_stage:
                stages = ", ".join(sorted({manifest.stage for manifest in self.list()})) or "none"
                raise InputError(
                    f"{ref}: no artifact of stage {stage!r} in {self.backend.place}; run it first, or take another; "
                    f"stages that have one: {stages}"
                )
            return of_stage[-1]
        if not re.fullmatch("[0-9a-f]{6,64}", ref):
            raise InputError(f"{ref!r}: give 6 or more hex characters of a key or digest, or latest:<stage>")
        if len(ref) == 64:  # a whole key, or a digest that has been seen before: no need to list everything
            for key in (ref, _KEYS.get(ref, "")):
                manifest = self.find(key, compare=False) if key else None
                if manifest is not None and ref in (manifest.key, manifest.digest):
                    return manifest
        manifests = self.list()
        # One entry per key: a key means its newest attempt, which comes last in the list.
        matches = {m.key: m for m in manifests if m.key.startswith(ref) or m.digest.startswith(ref)}
        if not matches:
            raise InputError(
                f"{ref}: no artifact in {self.backend.place} has this key or digest; `r1 stages` lists them"
            )
        if len(matches) > 1:
            names = ", ".join(f"{m.stage} {m.digest[: len(ref) + 4]}" for m in matches.values())
            raise InputError(f"{ref}: stands for {len(matches)} artifacts ({names}); give more characters")
        return next(iter(matches.values()))

    def check(self, manifest: Manifest, *, every_byte: bool = False) -> Manifest:
        """Returns the artifact if the contents of its files match the manifest. All of them are on this machine then.
        Files that have not changed since they were last compared are not read, unless `every_byte` is set.

        Raises:
            InputError: a file is missing or its contents differ.
        """
        if problem := self.backend.changed(manifest, every_byte=every_byte):
            raise _damaged(manifest, problem)
        return manifest

    def check_here(self, manifest: Manifest) -> Manifest:
        """As `check`, for the files that are on this machine. Those in an object store are compared when they are
        fetched."""
        if problem := self.backend.changed_here(manifest):
            raise _damaged(manifest, problem)
        return manifest

    @contextlib.contextmanager
    def attempt(self, stage: str, key: str, *, force: bool = False, uses: Collection[str] = ()) -> Iterator[Attempt]:
        """Holds the lock of `key` and yields an attempt, which may continue one that was killed.

        The caller calls `find` again inside, because another process may have published while this one waited for the
        lock. Work is kept until it is published. `force` starts from scratch, unless it continues a forced attempt.
        `uses`: digests of the inputs, which `r1 prune` keeps in the meantime.
        """
        with explain_full_disk(self.root), self._lock(key) as lock_fd, self.backend.lock(key, uses):
            attempt = Attempt(self.root, self.backend, stage, key, lock_fd)
            attempt.open(force, uses)
            try:
                yield attempt
            finally:
                attempt.close()

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[int]:
        path = self.root / "locks" / f"{key}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The file is never removed: a waiting process would then lock a file that no other process sees.
            # Its mode is the umask's: others who share the folder continue this artifact.
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            raise InputError(f"{self.root}: may not be written; set R1FLOW_HOME to a folder that may") from None
        try:
            waiting = False
            while True:  # polls instead of blocking in C, so that a cancelled thread can exit
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
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {utc_now()}\n".encode(), 0)
            # A trainer inherits the lock, so the lock is released only after both processes have ended.
            os.set_inheritable(fd, True)
            try:
                yield fd
            finally:
                os.ftruncate(fd, 0)  # a released lock names no holder; see is_abandoned
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def idle(self, *keys: str) -> Iterator[bool]:
        """Holds the locks of `keys` unless another process holds one of them. Does not wait. Yields whether all were
        free."""
        with contextlib.ExitStack() as stack:
            for key in keys:
                try:
                    # Open for writing: on NFS, an exclusive lock needs it.
                    file = stack.enter_context((self.root / "locks" / f"{key}.lock").open("r+b"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except FileNotFoundError:
                    pass  # nobody has ever worked on this key here
                except BlockingIOError:
                    yield False
                    return
                if not stack.enter_context(self.backend.lock(key, wait=False)):
                    yield False
                    return
            yield True

    def is_abandoned(self, key: str, since: datetime) -> bool:
        """Whether a process on this host took the lock of `key` after `since` and died while holding it.

        Always False for locks of other hosts, because not every shared file system shares locks.
        """
        path = self.root / "locks" / f"{key}.lock"
        try:
            with path.open("rb") as file:
                # A trainer that outlives the process may still hold the lock, so the lock decides, not the process.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                holder = re.fullmatch(r"process \d+ on (.+) since (\S+)", file.read().decode(errors="replace").strip())
        except (FileNotFoundError, BlockingIOError):
            return False
        if holder is None or holder[1] != socket.gethostname():
            return False
        return datetime.fromisoformat(holder[2]) >= since

    def list(self, stage: str | None = None) -> list[Manifest]:
        """Every complete artifact, or those of one stage, oldest first."""
        manifests = self.backend.manifests(stage)
        _KEYS.update((manifest.digest, manifest.key) for manifest in manifests)
        return manifests

    def newest_by_stage(self) -> dict[str, Manifest]:
        """The newest complete artifact of each stage that has one."""
        return self.backend.newest_by_stage()


def _damaged(manifest: Manifest, problem: str) -> InputError:
    return InputError(
        f"{manifest.location}: damaged: {problem}; `r1 verify --repair` sets it aside, and the next run makes it "
        f"again, as does `--force {manifest.stage}`"
    )
