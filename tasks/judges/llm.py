"""The common part of judges that are models: prompts, votes, one repair, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from grpo.data.records import Message
from tasks.judges.base import PREFERENCE, Claim, Judge, Pair, Response, Verdict
from tasks.judges.counts import JudgeCounts
from tasks.judges.prompts_and_replies import ASK_AGAIN, Reading, Reply, again, prompt, read
from tasks.judges.settings import JudgeSettings

T = TypeVar("T")
_CORRECTNESS: dict[str, Verdict] = {"correct": "correct", "incorrect": "incorrect"}
_SAFETY = {"safe": True, "unsafe": False}
_QUALITY = {"good": True, "poor": False}
_REFUSAL = {"refused": True, "answered": False}


class ModelJudge(Judge, Protocol):
    """A judge that asks a model. Subclasses turn dialogues into replies."""

    settings: JudgeSettings
    counts: JudgeCounts
    fallible: bool = True

    def reply_all(self, dialogues: Sequence[list[Message]], draws: Sequence[int]) -> list[Reply]:
        """The model's reply to each dialogue. `draws` numbers equal dialogues, for their random seeds."""

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        prompts = [prompt("correct", **claim._asdict()) for claim in claims]
        return [verdict or "undecided" for verdict in self._vote(prompts, "correctness", _CORRECTNESS)]

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [prompt("safe", prompt=r.problem.text, response=r.text) for r in responses]
        return self._vote(prompts, "safety", _SAFETY)

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [
            prompt("quality", prompt=r.problem.text, reference=r.problem.answer or "(none)", response=r.text)
            for r in responses
        ]
        return self._vote(prompts, "quality", _QUALITY)

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [prompt("refused", prompt=r.problem.text, response=r.text) for r in responses]
        return self._vote(prompts, "refusal", _REFUSAL)

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Preferences; with several votes their mean, half of them in each order. None if one vote is undecided."""
        votes = self.settings.compare_votes
        orders = [False] if votes == 1 else [False, True] * (votes // 2)
        prompts = [_comparison(pair, swapped) for pair in pairs for swapped in orders]
        with self.counts.timed():
            readings = iter(self._ask(prompts, [0] * len(prompts), "verdict", PREFERENCE))
        verdicts = []
        for _ in pairs:
            shown = [next(readings).verdict for _ in orders]
            self._count_order(shown)
            own = [-v if swapped else v for v, swapped in zip(shown, orders, strict=True) if v is not None]
            verdicts.append(sum(own) / votes if len(own) == votes else None)
        self._count_items(verdicts)
        return verdicts

    def _vote(self, prompts: Sequence[str], key: str, verdicts: Mapping[str, T]) -> list[T | None]:
        """The verdict of more than half of the votes. Stops asking once further votes cannot change it."""
        votes = self.settings.votes
        tallies: list[Counter[T]] = [Counter() for _ in prompts]
        cast = [0] * len(prompts)
        with self.counts.timed():
            while pending := [i for i, t in enumerate(tallies) for _ in range(_needed(t, votes - cast[i], votes))]:
                numbers = [cast[i] for i in pending]
                readings = self._ask([prompts[i] for i in pending], numbers, key, verdicts)
                for i, reading in zip(pending, readings, strict=True):
                    cast[i] += 1
                    if reading.verdict is not None:
                        tallies[i][reading.verdict] += 1
        won = [next((v for v, n in tally.items() if n > votes / 2), None) for tally in tallies]
        self._count_items(won)
        split = sum(verdict is None and tally.total() > 0 for verdict, tally in zip(won, tallies, strict=True))
        self.counts.add("items/no_majority", split)
        return won

    def _ask(
        self, prompts: Sequence[str], numbers: Sequence[int], key: str, verdicts: Mapping[str, T]
    ) -> list[Reading[T]]:
        """Reads a verdict for each prompt, after at most one repair. `numbers`: how often each was asked before."""
        dialogues: list[list[Message]] = [[{"role": "user", "content": text}] for text in prompts]
        draws = _draws(prompts, numbers)
        replies = self.reply_all(dialogues, draws)
        readings = [read(reply, key, verdicts) for reply in replies]
        if self.settings.ask_again and (broken := [i for i, r in enumerate(readings) if r.outcome in ASK_AGAIN]):
            repaired = self.reply_all(
                [again(dialogues[i], replies[i], readings[i].outcome) for i in broken], [draws[i] for i in broken]
            )
            for i, reply in zip(broken, repaired, strict=True):
                second = read(reply, key, verdicts)
                readings[i] = second if second.verdict is None else Reading(second.verdict, "asked_again")
            self.counts.add("asked_again", len(broken))
        self.counts.add("asked", len(prompts))
        self.counts.merge(Counter(f"outcome/{reading.outcome}" for reading in readings))
        return readings

    def _count_items(self, verdicts: Sequence[Any]) -> None:
        self.counts.merge({"items": len(verdicts), "items/undecided": sum(v is None for v in verdicts)})

    def _count_order(self, shown: Sequence[float | None]) -> None:
        """`shown`: one pair's verdicts, above 0 for what was shown first, in alternating orders."""
        for verdict in shown:
            if verdict is not None:
                self.counts.add(f"compared/{'first' if verdict > 0 else 'second' if verdict < 0 else 'tie'}")
        for one, other in zip(shown[::2], shown[1::2], strict=False):
            if one is not None and other is not None:
                self.counts.merge({"both_orders": 1, "flipped": _sign(one) != -_sign(other)})


def _comparison(pair: Pair, swapped: bool) -> str:
    a, b = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    return prompt("compare", prompt=pair.problem.text, a=a, b=b)


def _needed(tally: Counter[Any], left: int, votes: int) -> int:
    """Number of votes that the leader still needs for a majority; 0 if it has one, or cannot reach it."""
    needed = votes // 2 + 1 - max(tally.values(), default=0)
    return needed if 0 < needed <= left else 0


def _draws(prompts: Sequence[str], numbers: Sequence[int]) -> list[int]:
    seen: Counter[str] = Counter()
    draws = []
    for text, number in zip(prompts, numbers, strict=True):
        draws.append(number + seen[text])
        seen[text] += 1
    return draws


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
