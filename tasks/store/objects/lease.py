"""Locks of keys against other machines: an object per key, written only if nobody else wrote in between.

    locks/<key>    empty: free. Otherwise JSON: who holds it, for how long it counts, and what the attempt reads

The holder writes its lock again every quarter of LEASE_S. A lock that was not written for its lease counts as
abandoned and can be taken over. Its age is the difference of two times in one answer of the store, so the clocks of the
machines do not matter. All writes are conditional, so of several that take a lock one succeeds.

An attempt that was interrupted leaves its lock behind, with a lease of 0 if it ended in order. That keeps what it reads
from being pruned.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from grpo.errors import InputError
from tasks.store.objects.bucket import Bucket, StoredObject

logger = logging.getLogger(__name__)

LEASE_S = 60.0
"""Seconds for which a lock counts after its holder last wrote it."""
MARGIN_S = 2.0
"""Added to a lease, because the store's times have whole seconds."""
POLL_S = 1.0
"""Seconds between two looks at a lock that another holds."""
FOLDER = "locks"


@dataclass(frozen=True)
class LockRecord:
    """Contents of a lock that is held or was abandoned. `token` is new with every write. `place` names the machine and
    the home folder; locks between processes there are files, so what a dead one left there is known at once."""

    token: str
    holder: str
    place: str
    lease_s: float
    uses: tuple[str, ...] = ()

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def read_lock(stored: StoredObject | None) -> LockRecord | None:
    """The record of a lock; None if it is free. A damaged one belongs to nobody and has no lease."""
    if stored is None or not stored.body:
        return None
    try:
        values = json.loads(stored.body)
        return LockRecord(**{**values, "uses": tuple(values["uses"]), "lease_s": float(values["lease_s"])})
    except (ValueError, TypeError, KeyError):
        return LockRecord("", "nobody", "", 0)


class Lease:
    """The lock of one key, taken by this process. `root`: the home folder; `uses`: digests that the attempt reads."""

    def __init__(self, bucket: Bucket, key: str, root: Path, uses: Collection[str] = ()):
        self._bucket, self._key, self._root, self._uses = bucket, key, root, tuple(sorted(uses))
        self._place = place_of(root)
        self._holder = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now(UTC).isoformat()}"
        self._etag: str | None = None
        self._before: LockRecord | None = None
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name=f"lock {key[:16]}", daemon=True)

    def take(self, wait: bool) -> bool:
        """Takes the lock, after waiting for it. Without `wait`, returns False if another holds it."""
        told = False
        while True:
            stored = self._bucket.get(self._object)
            held = read_lock(stored)
            if held is not None and stored is not None and self._is_live(held, stored.age_s):
                if not wait:
                    return False
                if not told:
                    logger.warning("waiting for the lock of artifact %s, held by %s", self._key[:16], held.holder)
                    told = True
                time.sleep(POLL_S)
                continue
            self._etag = self._bucket.put_if(self._object, self._record(), stored.etag if stored else None)
            if self._etag is not None:
                self._before = held
                self._renewer.start()
                return True
            time.sleep(POLL_S / 10)  # another wrote it in between

    def release(self, *, attempted: bool) -> None:
        """Gives the lock back. Where an attempt can still be continued, a record of what it reads stays.

        `attempted`: this process worked on the key. Otherwise it leaves the record of another that did."""
        self._released.set()
        with self._writing, contextlib.suppress(InputError):  # an unreachable store: the lease ends by itself
            if self._etag is None:
                return
            before = None if attempted else self._before
            here = any(self._root.glob(f"work/*-{self._key[:16]}"))
            if before is not None and (here or before.place != self._place):
                body = replace(before, token=secrets.token_hex(8), lease_s=0.0).dump()
            else:
                body = self._record(lease_s=0.0) if here else b""
            self._overwrite(body)

    def _is_live(self, held: LockRecord, age_s: float) -> bool:
        return held.place != self._place and held.lease_s > 0 and age_s <= held.lease_s + MARGIN_S

    @property
    def _object(self) -> str:
        return f"{FOLDER}/{self._key}"

    def _record(self, lease_s: float | None = None) -> bytes:
        lease_s = LEASE_S if lease_s is None else lease_s
        return LockRecord(secrets.token_hex(8), self._holder, self._place, lease_s, self._uses).dump()

    def _overwrite(self, body: bytes) -> LockRecord | None:
        """Writes the lock that this process holds. If another has taken it, `_etag` becomes None, and the result is
        that one's record, or None if it is free."""
        etag = self._bucket.put_if(self._object, body, self._etag)
        stored = None if etag else self._bucket.get(self._object)
        taken = read_lock(stored)
        if stored and taken and (taken.holder, taken.place) == (self._holder, self._place):
            # An earlier write of ours arrived, but its answer did not.
            etag = self._bucket.put_if(self._object, body, stored.etag)
        self._etag = etag
        return taken

    def _renew(self) -> None:
        while not self._released.wait(LEASE_S / 4):
            with self._writing:
                if self._released.is_set():
                    return
                try:
                    taken = self._overwrite(self._record())
                except InputError as error:
                    logger.warning("the lock of artifact %s could not be renewed: %s", self._key[:16], error)
                    continue
                if self._etag is None:
                    logger.warning(
                        "the lock of artifact %s was not renewed in time and is now held by %s: both do the same work, "
                        "and what they publish stays whole",
                        self._key[:16],
                        taken.holder if taken else "another process",
                    )
                    return


def lock_records(bucket: Bucket) -> Iterator[LockRecord]:
    """Records of all locks that are held, or that interrupted attempts left."""
    for listed in bucket.listing(f"{FOLDER}/"):
        if listed.size and (record := read_lock(bucket.get(listed.key))) is not None:
            yield record


def place_of(root: Path) -> str:
    """Names this machine, since it was started, and the folder of the lock files in a home."""
    folder = root / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    state = folder.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{machine}:{state.st_dev}:{state.st_ino}"


def check_conditions(bucket: Bucket, marker: Path) -> None:
    """Raises InputError if the store ignores the conditions of writes. Asked once; then the file `marker` exists."""
    if marker.exists():
        return
    key = f"{FOLDER}/.conditions-{secrets.token_hex(4)}"
    bucket.put(key, b"first")
    kept = bucket.put_if(key, b"second", None) is None and bucket.put_if(key, b"third", '"0"') is None
    bucket.delete([key])
    if not kept:
        raise InputError(
            f"{bucket.url}: this server ignores the conditions If-None-Match and If-Match of writes, which locks need: "
            "use a newer version of it, or another"
        )
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
