"""A request of a fleet, and the endpoints that work on it."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grpo.http.connections import Cancellation
from grpo.http.fleet.member import Member

Item = TypeVar("Item")
Result = TypeVar("Result")


class RequestBatch(Generic[Result]):
    """Requests that were submitted together. `answers`: (index, result or error) of each, as they come."""

    def __init__(self, number: int):
        self.number = number
        self.answers: queue.SimpleQueue[tuple[int, Result | Exception]] = queue.SimpleQueue()
        self.cancelled = False


@dataclass(slots=True)
class Request(Generic[Item, Result]):
    """A request until it has a result or an error, which its batch gets once."""

    batch: RequestBatch[Result]
    index: int
    item: Item
    failures: int = 0
    answered: bool = False
    failed_at: list[Member] = field(default_factory=list)
    refused_by: list[Member] = field(default_factory=list)
    attempts: list[Attempt[Item, Result]] = field(default_factory=list)

    def __lt__(self, other: Request[Item, Result]) -> bool:
        """Whether it goes first: those submitted first do, also when they are sent again."""
        return (self.batch.number, self.index) < (other.batch.number, other.index)

    @property
    def done(self) -> bool:
        return self.answered or self.batch.cancelled

    def answer(self, result: Result | Exception) -> None:
        self.answered = True
        self.batch.answers.put((self.index, result))


@dataclass(eq=False, slots=True)
class Attempt(Generic[Item, Result]):
    """A request at one endpoint. `sent`: time.monotonic."""

    request: Request[Item, Result]
    member: Member
    sent: float
    cancellation: Cancellation = field(default_factory=Cancellation)
