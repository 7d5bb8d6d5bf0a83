"""Rendezvous of the machines of a run: the first machine tells the others which trainer to join.

All machines run the same command and share the home folder. torchrun's own variables give the number of this machine
(PET_NODE_RANK, 0 for the first) and the address where its processes meet (PET_RDZV_ENDPOINT, HOST:PORT on the first).

    <home>/nodes/<endpoint>/lock          held by the first machine's command while it runs
    <home>/nodes/<endpoint>/trainer.json  the trainer that runs on the first machine now
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo.distributed.rendezvous import ENDPOINT, ID, RANK
from grpo.errors import InputError

_PATIENCE_S = 5.0  # other machines briefly take the lock to test it


@dataclass(frozen=True)
class Announcement:
    """A trainer that needs all machines: its job file, and an id that no other trainer has."""

    id: str
    job: str


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of one run; `rank` is the number of this machine."""

    folder: Path
    endpoint: str
    rank: int

    @classmethod
    def of_environment(cls, home: Path, environment: Mapping[str, str] = os.environ) -> Rendezvous | None:
        """The rendezvous that torchrun's variables describe; None if they name no endpoint.

        Raises:
            InputError: the endpoint or rank is malformed.
        """
        endpoint, rank = environment.get(ENDPOINT, ""), environment.get(RANK, "0")
        if not endpoint:
            return None
        if not re.fullmatch(r".+:\d+", endpoint):
            raise InputError(f"{ENDPOINT} is {endpoint!r}; write HOST:PORT of the first machine, the same on all")
        if not rank.isdecimal():
            raise InputError(f"{RANK} is {rank!r}; number the machines 0, 1, ...")
        return cls(home / "nodes" / re.sub(r"[^\w.-]", "_", endpoint), endpoint, int(rank))

    @contextlib.contextmanager
    def lead(self) -> Iterator[None]:
        """Acts as the first machine. The others stay until this block ends, however it ends.

        Raises:
            InputError: another run is already leading at this endpoint.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as lock:
            deadline = time.monotonic() + _PATIENCE_S
            while not _take(lock.fileno(), fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise InputError(
                        f"another run meets at {self.endpoint}: give this one a port of its own ({ENDPOINT}), and "
                        f"machines other than the first their number ({RANK})"
                    )
                time.sleep(0.1)
            self._record.unlink(missing_ok=True)  # left by a run that was killed
            yield

    @contextlib.contextmanager
    def announce(self, job: Path) -> Iterator[dict[str, str]]:
        """Calls the other machines to a trainer; they leave it when the block ends. Yields the environment variables
        for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        announcement = Announcement(uuid.uuid4().hex, str(job))
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(announcement)))
        partial.replace(self._record)
        try:
            yield {ID: announcement.id}
        finally:
            self._record.unlink(missing_ok=True)

    def announcement(self) -> Announcement | None:
        """The trainer that is running on the first machine now, if any."""
        try:
            return Announcement(**json.loads(self._record.read_text()))
        except FileNotFoundError:
            return None

    def is_led(self) -> bool:
        """Whether the first machine's command is running."""
        try:
            with (self.folder / "lock").open("r") as lock:
                return not _take(lock.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    @property
    def _record(self) -> Path:
        return self.folder / "trainer.json"


def _take(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
