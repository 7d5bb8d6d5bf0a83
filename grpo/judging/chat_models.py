"""Language models as a judge uses them: dialogues in, replies out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from grpo.data.records import Message
from grpo.judging.counts import JudgeCounts
from grpo.judging.replies import Reply

OnProgress = Callable[[int, int], None]
"""Called with the number of answered dialogues of a batch and the number of all, which rise. Called in any thread, but
never in two at once."""


class OnReply(Protocol):
    """Follows the requests of a batch. Called in any thread."""

    def begin(self, index: int) -> None:
        """Called before the dialogue at `index` is sent. If it raises, no further dialogue is sent."""

    def end(self, index: int, reply: Reply | None) -> None:
        """Called with the reply, also with one that was stored and is not asked for; None if the request failed."""


class CountedReplies(OnReply):
    """Tells how many dialogues of a batch have been answered."""

    def __init__(self, of: int, on_progress: OnProgress):
        self._of, self._on_progress = of, on_progress
        self._done = self._told = 0
        self._counting, self._telling = threading.Lock(), threading.Lock()

    def begin(self, index: int) -> None:
        pass

    def end(self, index: int, reply: Reply | None) -> None:
        with self._counting:
            self._done += 1
            done = self._done
        # Requests do not wait while progress is shown; only the last one does, so that it is told.
        if self._telling.acquire(blocking=done == self._of):
            try:
                if done > self._told:
                    self._told = done
                    self._on_progress(done, self._of)
            finally:
                self._telling.release()


class ChatModel(Protocol):
    """A language model that replies to dialogues."""

    counts: JudgeCounts
    """Requests, faults and tokens since it was created."""

    waits: bool
    """Whether it runs elsewhere, so that threads can wait for it while this process works."""

    def reply_all(
        self, dialogues: Sequence[list[Message]], draws: Sequence[int], on_reply: OnReply | None = None
    ) -> list[Reply]:
        """The model's reply to each dialogue, in order. `draws`: the number of each among equal dialogues, for its
        seed."""

    def close(self) -> None:
        """Aborts requests in progress."""
