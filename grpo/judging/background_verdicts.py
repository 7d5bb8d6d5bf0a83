"""Verdicts on answers during scoring; in the background if the model runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from grpo.config.judge import JudgeSettings
from grpo.errors import InputError, TrainingStopped
from grpo.judging.create_voter import MODELS, make_voter
from grpo.judging.voting import Check, Claim

Question = Claim | Check


class AnswerJudge:
    """A judge of single answers. Thread-safe."""

    def __init__(self, settings: JudgeSettings, folder: Path | None, processes: int = 1):
        """See `make_voter`. Raises InputError unless the judge is a model."""
        check_kind(settings)
        self.settings = settings
        self.voter = make_voter(settings, folder, processes)
        self._threads = ThreadPoolExecutor(settings.concurrency, "judge") if self.voter.model.waits else None

    def start(self, questions: Iterable[Question]) -> Verdicts:
        """Starts judging; equal questions are asked once. A model in this process runs only in `Verdicts.finish`."""
        once = list(dict.fromkeys(questions))
        if self._threads is None:
            return Verdicts(self, once, [])
        return Verdicts(self, once, [self._threads.submit(self.judge, [question]) for question in once])

    def judge(self, questions: list[Question]) -> list[bool | None]:
        """The verdict on each question: whether correct, or fulfilled; None if undecided."""
        claims = [question for question in questions if isinstance(question, Claim)]
        checks = [question for question in questions if isinstance(question, Check)]
        verdicts: dict[Question, bool | None] = {}
        verdicts |= zip(claims, self.voter.correct_all(claims) if claims else (), strict=True)
        verdicts |= zip(checks, self.voter.fulfilled_all(checks) if checks else (), strict=True)
        return [verdicts[question] for question in questions]

    def close(self) -> None:
        self.voter.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


class Verdicts:
    """Pending verdicts."""

    def __init__(self, judge: AnswerJudge, questions: list[Question], futures: list[Future[list[bool | None]]]):
        self._judge, self._questions, self._futures = judge, questions, futures

    @property
    def ready(self) -> bool:
        return all(future.done() for future in self._futures)

    def finish(self) -> dict[Question, bool | None]:
        """Waits for all verdicts. Raises TrainingStopped if the endpoint stays unreachable, and InputError if it
        refuses or the budget is spent."""
        try:
            if not self._futures:
                return dict(zip(self._questions, self._judge.judge(self._questions), strict=True))
            verdicts = [future.result()[0] for future in self._futures]
        except ConnectionError as error:
            raise TrainingStopped(str(error)) from None
        return dict(zip(self._questions, verdicts, strict=True))


def check_kind(settings: JudgeSettings) -> None:
    """InputError unless the judge is a model."""
    if settings.kind not in MODELS:
        raise InputError(f"judge {settings.kind!r} verifies no answers; take kind {' or '.join(map(repr, MODELS))}")
