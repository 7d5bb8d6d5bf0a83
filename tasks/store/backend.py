"""What a store needs from the place that holds its published artifacts: a local folder, or a bucket.

Attempts in progress are always in the local folder of the store; see `tasks.store.attempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tasks.store.manifest import Manifest


@dataclass(frozen=True)
class Flaw:
    """One problem. `what` names the affected thing, `said` says what is wrong with it.

    `repair` fixes it and returns what it did, or "" if it could not. It is None if only another run can fix it; then
    `remedy` says which run.
    """

    kind: Literal["corrupt", "missing", "orphaned", "running"]
    what: str
    said: str
    repair: Callable[[], str] | None = None
    remedy: str = ""


Idle = Callable[..., AbstractContextManager[bool]]
"""`Store.idle`: holds the locks of keys unless another process holds one of them."""


class Backend(Protocol):
    """Published artifacts, and pointers to the current ones. Any number of processes read and write at the same time.

    An artifact appears at once and is never written again. Everything that needs the lock of a key says so.
    """

    @property
    def place(self) -> str:
        """The folder or the address, for messages."""

    def newest(self, key: str) -> Manifest | None:
        """The newest attempt at `key` whose manifest is consistent and whose files have the recorded sizes. Warns of
        attempts that it skips."""

    def manifests(self, stage: str | None) -> list[Manifest]:
        """Manifests of all artifacts, or of those of one stage, oldest first. Warns of damaged ones."""

    def newest_by_stage(self) -> dict[str, Manifest]:
        """The last of `manifests` of each stage."""

    def changed(self, manifest: Manifest, *, every_byte: bool) -> str | None:
        """Brings all files to this machine and says what is wrong with the first whose contents differ from the
        manifest; None if all match. Without `every_byte`, files that were compared before are not read again."""

    def changed_here(self, manifest: Manifest) -> str | None:
        """The same, without bringing any file to this machine."""

    def publish(self, out: Path, stage: str, key: str, seal: Callable[[int], Manifest], *, forced: bool) -> Manifest:
        """Makes the folder `out` an artifact, under the lock of `key`. `seal` writes and returns the manifest for an
        attempt's number. `forced`: nothing that an earlier attempt left is taken over."""

    def remove(self, manifest: Manifest) -> None:
        """Removes an artifact, for all readers at the same moment, under the lock of its key."""

    def lock(self, key: str, uses: Collection[str] = (), *, wait: bool = True) -> AbstractContextManager[bool]:
        """Holds the lock of `key` against other machines, after waiting for it. Without `wait`, yields False if another
        holds it. `uses`: digests that the holder reads. Locks between processes of a machine are those of `Store`."""

    def uses(self) -> set[str]:
        """Digests that attempts of all machines read."""

    def pointers(self) -> dict[str, str]:
        """RECIPE-SEED/SLOT -> digest of the current artifact. See `tasks.store.stale`."""

    def point(self, name: str, digest: str) -> None:
        """Writes one pointer. The last writer wins."""

    def unpoint(self, name: str) -> None:
        """Removes a pointer, if it exists."""

    def flaws(self, idle: Idle, *, every_byte: bool) -> Generator[Flaw, None, list[Manifest]]:
        """Yields damaged artifacts. Returns the manifests of the intact ones."""

    def leftovers(self, idle: Idle) -> Iterator[Flaw]:
        """Yields what belongs to no artifact and no live attempt."""
