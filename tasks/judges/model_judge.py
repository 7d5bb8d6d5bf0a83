"""A judge that asks a model about answers, pairs and responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.judging.chat_models import OnProgress
from grpo.judging.create_voter import make_voter
from grpo.judging.questions import prompt, question_of
from tasks.judges.base import PREFERENCE, Claim, Judge, Pair, Response, Verdict

_CORRECTNESS: dict[bool | None, Verdict] = {True: "correct", False: "incorrect", None: "undecided"}
_SAFETY = {"safe": True, "unsafe": False}
_QUALITY = {"good": True, "poor": False}
_REFUSAL = {"refused": True, "answered": False}


class ModelJudge(Judge):
    """Asks a model, in this process or at an endpoint (`grpo.judging`)."""

    fallible = True

    def __init__(self, settings: JudgeSettings, replies: Path | None = None, on_progress: OnProgress | None = None):
        self.settings, self.voter = settings, make_voter(settings, replies, on_progress=on_progress)
        self.counts = self.voter.counts

    def correct_all(self, claims: Sequence[Claim]) -> list[Verdict]:
        return [_CORRECTNESS[verdict] for verdict in self.voter.correct_all(claims)]

    def safe_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [prompt("safe", **_shown(r)) for r in responses]
        return self.voter.vote(prompts, "safety", _SAFETY)

    def good_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [prompt("quality", **_shown(r), reference=r.problem.answer or "(none)") for r in responses]
        return self.voter.vote(prompts, "quality", _QUALITY)

    def refused_all(self, responses: Sequence[Response]) -> list[bool | None]:
        prompts = [prompt("refused", **_shown(r)) for r in responses]
        return self.voter.vote(prompts, "refusal", _REFUSAL)

    def compare_all(self, pairs: Sequence[Pair]) -> list[float | None]:
        """Preferences. With several votes, their mean, with half of the votes in each order. None if any vote is
        undecided."""
        votes = self.settings.compare_votes
        orders = [False] if votes == 1 else [False, True] * (votes // 2)
        prompts = [_comparison(pair, swapped) for pair in pairs for swapped in orders]
        with self.counts.timed():
            readings = iter(self.voter.ask(prompts, [0] * len(prompts), "verdict", PREFERENCE))
        verdicts = []
        for _ in pairs:
            shown = [next(readings).verdict for _ in orders]
            self._count_order(shown)
            own = [-v if swapped else v for v, swapped in zip(shown, orders, strict=True) if v is not None]
            verdicts.append(sum(own) / votes if len(own) == votes else None)
        self.voter.count_items(verdicts)
        return verdicts

    def _count_order(self, shown: Sequence[float | None]) -> None:
        """`shown`: verdicts on one pair in alternating orders, above 0 if the response shown first is better."""
        for verdict in shown:
            if verdict is not None:
                self.counts.add(f"compared/{'first' if verdict > 0 else 'second' if verdict < 0 else 'tie'}")
        for one, other in zip(shown[::2], shown[1::2], strict=False):
            if one is not None and other is not None:
                self.counts.merge({"both_orders": 1, "flipped": _sign(one) != -_sign(other)})


def _shown(response: Response) -> dict[str, str]:
    return {"prompt": question_of(response.problem.messages), "response": response.text}


def _comparison(pair: Pair, swapped: bool) -> str:
    a, b = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    return prompt("compare", prompt=question_of(pair.problem.messages), a=a, b=b)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
