"""The artifact store: what each stage made, under a key that says what it was made from.

    <root>/artifacts/<stage>/<key>/<attempt>/   published: files and manifest.json, never written again
    <root>/work/<stage>-<key[:16]>/             an attempt under way: attempt.json, out/, state/
    <root>/locks/<key>.lock                     held by the process that works on the key

An artifact appears by one rename, so a reader sees all of it or nothing. The store is the source of truth about what
exists: every look-up checks the files themselves, their contents as `tasks.store.checks` says.
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
from tasks.store.checks import changed_file
from tasks.store.listing import read_manifests
from tasks.store.manifest import Manifest, read_manifest

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.2


class Store:
    """The artifacts below one folder. Any number of processes may read and write it at once."""

    def __init__(self, root: Path):
        self.root = root

    def find(self, key: str, *, compare: bool = True) -> Manifest | None:
        """The newest complete attempt at `key`. Attempts with missing files, other sizes or edited manifests are
        skipped with a warning. Raises InputError where the contents of a file changed, unless `compare` is off; see
        `check`."""
        folders = [path for path in self.root.glob(f"artifacts/*/{key}/*") if path.name.isdecimal()]
        for folder in sorted(folders, key=lambda path: int(path.name), reverse=True):
            if manifest := read_manifest(folder):
                return self.check(manifest) if compare else manifest
        return None

    def resolve(self, ref: str) -> Manifest:
        """The artifact named by a key or digest (6 or more of its first characters) or by `latest:<stage>`. The
        contents of its files are not compared with their hashes; see `check`.

        Raises:
            InputError: for a reference that is malformed, unknown or ambiguous.
        """
        if ref.startswith("latest:"):
            stage = ref.removeprefix("latest:")
            of_stage = self.list(stage) if stage and Path(stage).name == stage else []
            if not of_stage:
                stages = ", ".join(sorted({manifest.stage for manifest in self.list()})) or "none"
                raise InputError(
                    f"{ref}: no artifact of stage {stage!r} in {self.root}; run it first, or take another; stages that "
                    f"have one: {stages}"
                )
            return of_stage[-1]
        if not re.fullmatch("[0-9a-f]{6,64}", ref):
            raise InputError(f"{ref!r}: give 6 or more hex characters of a key or digest, or latest:<stage>")
        if len(ref) == 64 and (manifest := self.find(ref, compare=False)):
            return manifest
        manifests = self.list()
        # One entry per key: a key stands for its newest attempt, which comes last in the list.
        matches = {m.key: m for m in manifests if m.key.startswith(ref) or m.digest.startswith(ref)}
        if not matches:
            raise InputError(f"{ref}: no artifact in {self.root} has this key or digest; `r1 stages` lists them")
        if len(matches) > 1:
            names = ", ".join(f"{m.stage} {m.digest[: len(ref) + 4]}" for m in matches.values())
            raise InputError(f"{ref}: stands for {len(matches)} artifacts ({names}); give more characters")
        return next(iter(matches.values()))

    def check(self, manifest: Manifest, *, every_byte: bool = False) -> Manifest:
        """The artifact, if its files have the contents that the manifest says. Files that have not changed since they
        were last compared are not read, unless `every_byte` asks for it.

        Raises:
            InputError: a file has other contents, or is missing.
        """
        if problem := changed_file(self.root, manifest, every_byte=every_byte):
            raise InputError(
                f"{manifest.path}: damaged: {problem}; `r1 verify --repair` sets it aside, and the next run makes it "
                f"again, as does `--force {manifest.stage}`"
            )
        return manifest

    @contextlib.contextmanager
    def attempt(self, stage: str, key: str, *, force: bool = False, uses: Collection[str] = ()) -> Iterator[Attempt]:
        """Hold the lock of `key` and yield an attempt, which may continue one that was killed.

        The caller checks `find` again inside: another process may have published while this one waited for the lock.
        Work is kept until it is published. `force` starts from scratch, except where it continues a forced attempt.
        `uses`: digests of the inputs, which `r1 prune` keeps meanwhile.
        """
        with explain_full_disk(self.root), self._lock(key) as lock_fd:
            attempt = Attempt(self.root, stage, key, lock_fd)
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
            # The file is never removed: a waiting process would go on to lock a file that no other process sees.
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except PermissionError:
            raise InputError(f"{self.root}: may not be written; set R1FLOW_HOME to a folder that may") from None
        try:
            waiting = False
            while True:  # polls instead of blocking in C, so that a cancelled thread can leave
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
            # A trainer inherits the lock, so it becomes free only when both processes are gone.
            os.set_inheritable(fd, True)
            try:
                yield fd
            finally:
                os.ftruncate(fd, 0)  # a released lock names no holder; see is_abandoned
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def idle(self, *keys: str) -> Iterator[bool]:
        """Holds the locks of `keys` unless a process holds one of them. Does not wait; yields whether all were free."""
        with contextlib.ExitStack() as stack:
            for key in keys:
                try:
                    file = stack.enter_context((self.root / "locks" / f"{key}.lock").open("rb"))
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except FileNotFoundError:
                    continue  # nobody ever worked on it here
                except BlockingIOError:
                    yield False
                    return
            yield True

    def is_abandoned(self, key: str, since: datetime) -> bool:
        """Whether a process of this host took the lock of `key` after `since` and died while holding it.

        Always False for locks of other hosts: not every shared file system shares its locks.
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
        return read_manifests(self.root, stage)
