"""Language models as a judge uses them: dialogues in, replies out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from grpo.data.records import Message
from grpo.judging.counts import JudgeCounts
from grpo.judging.replies import Reply


class OnReply(Protocol):
    """Follows the requests of a batch. Called in any thread."""

    def begin(self, index: int) -> None:
        """Called before the dialogue at `index` is sent. If it raises, no further dialogue is sent."""

    def end(self, index: int, reply: Reply | None) -> None:
        """Called with the reply; None if the request failed."""


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
