"""A model's verdicts: one question each, several votes, one repair of an unreadable reply, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grpo.config.judge import JudgeSettings
from grpo.data.records import Message
from grpo.judging.chat_models import ChatModel, CountedReplies, OnProgress
from grpo.judging.questions import prompt
from grpo.judging.replies import ASK_AGAIN, Reading, again, read

T = TypeVar("T")
_CORRECTNESS = {"correct": True, "incorrect": False}
_FULFILMENT = {"fulfilled": True, "not fulfilled": False}


class Claim(NamedTuple):
    """An answer to be checked against a reference."""

    question: str
    reference: str
    answer: str


class Check(NamedTuple):
    """A response to be checked against one criterion of a rubric."""

    question: str
    criterion: str
    response: str


class Voter:
    """A model that is asked for verdicts. Thread-safe where its model is."""

    def __init__(self, settings: JudgeSettings, model: ChatModel, on_progress: OnProgress | None = None):
        self.settings, self.model, self.counts = settings, model, model.counts
        self.on_progress = on_progress

    def correct_all(self, claims: Sequence[Claim]) -> list[bool | None]:
        """Whether each answer means the same as its reference; None if undecided."""
        return self.vote([prompt("correct", **claim._asdict()) for claim in claims], "correctness", _CORRECTNESS)

    def fulfilled_all(self, checks: Sequence[Check]) -> list[bool | None]:
        """Whether each response fulfils its criterion; None if undecided."""
        return self.vote([prompt("criterion", **check._asdict()) for check in checks], "verdict", _FULFILMENT)

    def vote(self, prompts: Sequence[str], key: str, verdicts: Mapping[str, T]) -> list[T | None]:
        """The verdict of more than half the votes. Stops asking once further votes cannot change it."""
        votes = self.settings.votes
        tallies: list[Counter[T]] = [Counter() for _ in prompts]
        cast = [0] * len(prompts)
        first = [votes * number for number in _numbers(prompts)]  # equal prompts have different draws
        with self.counts.timed():
            while pending := [i for i, t in enumerate(tallies) for _ in range(_needed(t, votes - cast[i], votes))]:
                numbers = [first[i] + cast[i] for i in pending]
                readings = self.ask([prompts[i] for i in pending], numbers, key, verdicts)
                for i, reading in zip(pending, readings, strict=True):
                    cast[i] += 1
                    if reading.verdict is not None:
                        tallies[i][reading.verdict] += 1
        won = [next((v for v, n in tally.items() if n > votes / 2), None) for tally in tallies]
        self.count_items(won)
        split = sum(verdict is None and tally.total() > 0 for verdict, tally in zip(won, tallies, strict=True))
        self.counts.add("items/no_majority", split)
        return won

    def ask(
        self, prompts: Sequence[str], numbers: Sequence[int], key: str, verdicts: Mapping[str, T]
    ) -> list[Reading[T]]:
        """Reads a verdict for each prompt, after at most one repair. `numbers`: the draw of each prompt; equal prompts
        with the same number get this draw and the next ones."""
        dialogues: list[list[Message]] = [[{"role": "user", "content": text}] for text in prompts]
        repeats = _numbers([*zip(prompts, numbers, strict=True)])
        draws = [number + repeat for number, repeat in zip(numbers, repeats, strict=True)]
        counted = CountedReplies(len(prompts), self.on_progress) if self.on_progress else None
        replies = self.model.reply_all(dialogues, draws, counted)
        readings = [read(reply, key, verdicts) for reply in replies]
        if self.settings.ask_again and (broken := [i for i, r in enumerate(readings) if r.outcome in ASK_AGAIN]):
            repaired = self.model.reply_all(
                [again(dialogues[i], replies[i], readings[i].outcome) for i in broken], [draws[i] for i in broken]
            )
            for i, reply in zip(broken, repaired, strict=True):
                second = read(reply, key, verdicts)
                readings[i] = second if second.verdict is None else second._replace(outcome="asked_again")
            self.counts.add("asked_again", len(broken))
        self.counts.add("asked", len(prompts))
        self.counts.merge(Counter(f"outcome/{reading.outcome}" for reading in readings))
        return readings

    def count_items(self, verdicts: Sequence[Any]) -> None:
        self.counts.merge({"items": len(verdicts), "items/undecided": sum(v is None for v in verdicts)})

    def close(self) -> None:
        self.model.close()


def _needed(tally: Counter[Any], left: int, votes: int) -> int:
    """Number of votes that the leading verdict still needs for a majority; 0 if it has one or cannot reach it."""
    needed = votes // 2 + 1 - max(tally.values(), default=0)
    return needed if 0 < needed <= left else 0


def _numbers(items: Sequence[Hashable]) -> list[int]:
    """How many equal items stand before each."""
    seen: Counter[Hashable] = Counter()
    numbers = []
    for item in items:
        numbers.append(seen[item])
        seen[item] += 1
    return numbers
