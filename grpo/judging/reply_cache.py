"""A cache of a judge's replies in a file, so that answered questions are not asked, or paid for, again.

A job that was killed, or that stopped because the endpoint was away or the budget was spent, resumes after its last
reply.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.data.records import Message
from grpo.errors import InputError
from grpo.judging.chat_models import ChatModel, OnReply
from grpo.judging.replies import Reply

logger = logging.getLogger(__name__)

_ASKED = {"kind", "model", "path", "request", "temperature", "max_tokens", "seed"}
"""Settings that a reply depends on. The endpoint's address is not among them, because it may change."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS checked_replies "
    "(key TEXT PRIMARY KEY, text TEXT, cut INTEGER, tokens INTEGER, checksum INTEGER)"
)


class BudgetSpent(InputError):
    """The judge's budget allows no further request."""


class _Damaged(sqlite3.DatabaseError):
    """A file of replies cannot be read. A full disk and the like are other errors: a new file would not help."""


class RepliesStore:
    """Stored replies by question. Thread-safe; each process has its own file in the folder."""

    def __init__(self, folder: Path | None):
        """Takes the first file that no other process holds, so that a resumed job with the same number of processes
        finds its files. A damaged file is moved aside. None: replies are counted but not stored.

        Raises sqlite3.DatabaseError if the file cannot be written, for example on a full disk."""
        self._lock = threading.Lock()
        self._file = _open(folder) if folder else None
        self.requests = self.tokens = 0
        if self._file:
            self.requests, self.tokens = self._file.execute(
                "SELECT count(*), coalesce(sum(tokens), 0) FROM checked_replies"
            ).fetchone()

    def get(self, key: str) -> Reply | None:
        if self._file is None:
            return None
        with self._lock:
            row = self._file.execute(
                "SELECT text, cut, tokens, checksum FROM checked_replies WHERE key = ?", (key,)
            ).fetchone()
        if row is None or row[3] != _checksum(key, *row[:3]):  # a damaged reply is asked for again
            return None
        return Reply(row[0], bool(row[1]), tokens=row[2])

    def add(self, key: str, reply: Reply) -> None:
        with self._lock:
            self.requests += 1
            self.tokens += reply.tokens
            if self._file:
                row = (key, reply.text.encode("utf-8", "replace").decode(), int(reply.cut), reply.tokens)
                self._file.execute(
                    "INSERT OR REPLACE INTO checked_replies VALUES (?, ?, ?, ?, ?)", (*row, _checksum(*row))
                )
                self._file.commit()

    def close(self) -> None:
        with self._lock:
            if self._file:
                self._file.close()


def _checksum(*row: object) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _open(folder: Path) -> sqlite3.Connection:
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        path = folder / f"replies-{number}.sqlite"
        existed = path.exists()
        try:
            if file := _claimed(path):
                return file
            number += 1
        except _Damaged as error:
            if not existed:  # another new file would be no better
                raise
            damaged = path.with_suffix(f".damaged-{time.time_ns()}")
            logger.warning(
                "%s is damaged (%s); it is moved to %s, and its questions are asked again", path, error, damaged
            )
            path.replace(damaged)


def _claimed(path: Path) -> sqlite3.Connection | None:
    """Opens the file with its table and locks it until closed; None if another process holds it."""
    file = sqlite3.connect(path, timeout=0, check_same_thread=False)
    try:
        file.execute("PRAGMA locking_mode = EXCLUSIVE")
        file.execute("BEGIN EXCLUSIVE")
        file.execute(_TABLE)
        file.commit()
        (state,) = file.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        file.close()
        code = error.sqlite_errorcode & 0xFF  # the higher bits are details
        if code == sqlite3.SQLITE_BUSY:
            return None
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise _Damaged(str(error)) from None
        raise
    if state != "ok":
        file.close()
        raise _Damaged(state)
    return file


class RememberingModel(ChatModel):
    """A model that is asked each question only once, within its budget."""

    def __init__(self, model: ChatModel, settings: JudgeSettings, folder: Path | None, processes: int = 1):
        """`folder`: where replies are stored. `processes`: number of the job's processes, which share the budget
        equally."""
        self.model, self.counts, self.waits = model, model.counts, model.waits
        self._store = RepliesStore(folder)
        self._asked = json.dumps(settings.model_dump(mode="json", include=_ASKED), sort_keys=True)
        self._requests_max = _part(settings.budget_requests, processes)
        self._tokens_max = _part(settings.budget_tokens, processes)
        self._under_way = 0
        self._lock = threading.Lock()

    def reply_all(
        self, dialogues: Sequence[list[Message]], draws: Sequence[int], on_reply: OnReply | None = None
    ) -> list[Reply]:
        """Raises BudgetSpent if a new request would exceed the budget; replies in progress are stored first."""
        keys = [self._key(dialogue, draw) for dialogue, draw in zip(dialogues, draws, strict=True)]
        replies = {i: reply for i, key in enumerate(keys) if (reply := self._store.get(key))}
        self.counts.add("remembered", len(replies))
        missing = [i for i in range(len(keys)) if i not in replies]
        if on_reply:
            for i, reply in replies.items():
                on_reply.end(i, reply)
        watch = _Watch(self, keys, missing, on_reply)
        asked = (
            self.model.reply_all([dialogues[i] for i in missing], [draws[i] for i in missing], watch) if missing else []
        )
        replies |= zip(missing, asked, strict=True)
        return [replies[i] for i in range(len(keys))]

    def close(self) -> None:
        self.model.close()
        with contextlib.suppress(sqlite3.Error):
            self._store.close()

    def _key(self, dialogue: list[Message], draw: int) -> str:
        return hashlib.blake2b(json.dumps([self._asked, dialogue, draw]).encode(), digest_size=16).hexdigest()

    def begin(self) -> None:
        """Takes one request from the budget."""
        with self._lock:
            spent = self._store.requests + self._under_way
            if self._requests_max is not None and spent >= self._requests_max:
                raise _spent("budget_requests", self._requests_max)
            if self._tokens_max is not None and self._store.tokens >= self._tokens_max:
                raise _spent("budget_tokens", self._tokens_max)
            self._under_way += 1

    def end(self, key: str, reply: Reply | None) -> None:
        """Stores the reply, if there is one."""
        with self._lock:
            self._under_way -= 1
            if reply is not None and not reply.missing:
                self._store.add(key, reply)


class _Watch(OnReply):
    """Follows the requests that are not stored yet, which are `missing` of all `keys`."""

    def __init__(self, model: RememberingModel, keys: Sequence[str], missing: Sequence[int], on_reply: OnReply | None):
        self.model, self.keys, self.missing, self.on_reply = model, keys, missing, on_reply

    def begin(self, index: int) -> None:
        self.model.begin()
        if self.on_reply:
            self.on_reply.begin(self.missing[index])

    def end(self, index: int, reply: Reply | None) -> None:
        self.model.end(self.keys[self.missing[index]], reply)
        if self.on_reply:
            self.on_reply.end(self.missing[index], reply)


def _part(budget: int | None, processes: int) -> int | None:
    return None if budget is None else budget // processes


def _spent(name: str, limit: int) -> BudgetSpent:
    return BudgetSpent(
        f"judge: {name} is spent ({limit:,} in this process); replies so far are kept: raise it and run again"
    )
