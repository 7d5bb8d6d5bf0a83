"""One shard: reads problems and writes a parquet file of scored samples; in rounds while problems lack correct
samples."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from grpo.config.common import Sampling
from grpo.config.jobs import SampleTask
from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import form_of
from grpo.errors import InputError
from grpo.generation.text_engines import TextEngine
from grpo.rewards.functions import Response
from grpo.sampling.journal import Journal
from grpo.scoring.scorer import Failures, Scorer, Scores

UNDER_WAY = 256
"""Maximum number of groups whose scores are pending."""


@dataclass
class SampledProblem:
    """The completions of one problem in one round. Gets a journal line when sampled and another when scored."""

    problem: str
    round: int
    source: str = ""
    engine: str = ""
    prompt_tokens: int = 0
    # (text, number of tokens, whether it ended with the end token)
    completions: list[tuple[str, int, bool]] = field(default_factory=list)
    rewards: list[dict[str, float]] | None = None
    failures: dict[str, Any] = field(default_factory=dict)
    judged: dict[str, int] = field(default_factory=dict)  # items and items/undecided of grpo/judging/counts.py

    @property
    def right(self) -> int:
        return sum(breakdown.get("accuracy") == 1.0 for breakdown in self.rewards or ())

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.completions)


Earlier = Literal["sampled", "scored"] | None

_OF_SCORES = ("rewards", "failures", "judged")
_OF_LINE = {each.name for each in fields(SampledProblem)}


class Shard:
    """Consecutive problems of a task. Calls `done` for each finished group."""

    def __init__(
        self, task: SampleTask, problems: Sequence[Problem], seed: int, done: Callable[[SampledProblem], None]
    ):
        self.task, self.problems, self.seed, self.done = task, problems, seed, done
        self.groups: dict[tuple[str, int], SampledProblem] = {}
        self._journaled: dict[tuple[str, int], SampledProblem] = {}
        self._scored_earlier: dict[tuple[str, int], dict[str, int]] = {}  # and what was judged then
        self._by_id = {problem.id: problem for problem in problems}

    def make(self, path: Path, journal: Journal, engine: TextEngine, scorer: Scorer, failure_share: float) -> None:
        """Writes the file `path`. Does not sample groups in the journal again, but scores those again of which a reward
        failed. Removes the journal at the end."""
        for line in journal.lines():
            if not isinstance(line, dict) or line.keys() - _OF_LINE or not line.keys() >= {"problem", "round"}:
                raise InputError(f"{journal.path}: damaged: {str(line)[:80]!r} is no group; remove it to sample again")
            key = line["problem"], line["round"]
            self._journaled[key] = replace(self._journaled.get(key, SampledProblem(*key)), **line)
        self._scored_earlier = {k: group.judged for k, group in self._journaled.items() if group.rewards is not None}
        for group in self._journaled.values():
            if group.failures.get("broken"):  # perhaps not under other limits, or with the service up again
                group.rewards, group.failures, group.judged = None, {}, {}
        number = 0
        while problems := self._open(number):
            for group, scores in self._under_way(self._written(problems, number, journal, engine), scorer):
                self._finish(group, scores, journal)
            number += 1
        self._stop_above(failure_share)
        writing = writing_file(path)
        write_rows(writing, self._samples(), Sample)
        with writing.open("rb") as file:
            os.fsync(file.fileno())
        writing.replace(path)
        journal.remove()

    def earlier(self, group: SampledProblem) -> Earlier:
        """What an earlier attempt did with the group."""
        key = group.problem, group.round
        return "scored" if key in self._scored_earlier else "sampled" if key in self._journaled else None

    def judged_earlier(self, group: SampledProblem) -> dict[str, int]:
        """`SampledProblem.judged` of an earlier attempt. It differs from the group's if that was scored again."""
        return self._scored_earlier.get((group.problem, group.round), {})

    def _open(self, number: int) -> list[Problem]:
        """The problems to sample in round `number`."""
        task = self.task
        if number == 0:
            return [*self.problems]
        if task.enough_right is None or number * task.samples_per_problem >= task.samples_max:
            return []
        return [p for p in self.problems if p.domain == "reasoning" and self._right(p, number) < task.enough_right]

    def _right(self, problem: Problem, rounds: int) -> int:
        groups = [self.groups.get((problem.id, number)) for number in range(rounds)]
        # A problem is skipped in a round once it has enough right samples.
        return self.task.samples_max if None in groups else sum(group.right for group in groups if group)

    def _by_sampling(self, problems: list[Problem], count: int) -> Iterator[tuple[Sampling, int, list[Problem]]]:
        """Groups problems with equal sampling settings: yields the settings, the number of completions (`count` unless
        the task says otherwise) and the problems."""
        other, general = self.task.sampling_by_source, self.task.general_samples
        for source in [*sorted(other), None]:
            chosen = [p for p in problems if (p.source if p.source in other else None) == source]
            sampling = self.task.sampling if source is None else other[source]
            rest = [p for p in chosen if general is None or p.domain != "general"]
            if rest:
                yield sampling, count, rest
            if general is not None and (of_domain := [p for p in chosen if p.domain == "general"]):
                yield sampling, general, of_domain

    def _written(
        self, asked_problems: list[Problem], number: int, journal: Journal, engine: TextEngine
    ) -> Iterator[SampledProblem]:
        """Yields the groups of the round, those in the journal first."""
        found = {key: self._journaled[key] for p in asked_problems if (key := (p.id, number)) in self._journaled}
        self.groups |= found
        yield from found.values()
        task, count = self.task, self.task.samples_per_problem
        if number:
            count = min(count, task.samples_max - number * count)
        missing = [p for p in asked_problems if (p.id, number) not in found]
        for sampling, times, problems in self._by_sampling(missing, count):
            seeds = [seed_of_name(self.seed, problem.id, number) for problem in problems]
            for index, written in engine.write(problems, times, sampling, seeds):
                group = SampledProblem(
                    problem=problems[index].id,
                    round=number,
                    source=problems[index].source,
                    engine=engine.identity,
                    prompt_tokens=written.prompt_tokens,
                    completions=[(t.text, t.tokens, t.finished) for t in written.texts],
                )
                journal.append({name: value for name, value in vars(group).items() if name not in _OF_SCORES})
                self.groups[group.problem, number] = group
                yield group

    def _under_way(
        self, written: Iterator[SampledProblem], scorer: Scorer
    ) -> Iterator[tuple[SampledProblem, Scores | None]]:
        """Yields groups with their pending scores while others are being sampled; None if already scored."""
        waiting: deque[tuple[SampledProblem, Scores | None]] = deque()
        for group in written:
            waiting.append((group, self._scores(group, scorer) if group.rewards is None else None))
            while waiting and (len(waiting) > UNDER_WAY or waiting[0][1] is None or waiting[0][1].ready):
                yield waiting.popleft()
        yield from waiting

    def _scores(self, group: SampledProblem, scorer: Scorer) -> Scores:
        problem = self._by_id[group.problem]
        longest = self.task.sampling_by_source.get(problem.source, self.task.sampling).max_new_tokens
        return scorer.start(problem, [Response.to(problem, *written, longest) for written in group.completions])

    def _finish(self, group: SampledProblem, scores: Scores | None, journal: Journal) -> None:
        if scores is not None:
            scored = scores.finish()
            failed = scored.failures
            group.rewards = scored.breakdowns
            group.failures = {"broken": failed.broken, "example": failed.example, "kinds": dict(failed.kinds)}
            group.judged = scored.judged
            line = {name: getattr(group, name) for name in ("problem", "round", *_OF_SCORES)}
            journal.append(line)
        self.done(group)

    def _stop_above(self, share: float) -> None:
        failures = Failures()
        for group in self.groups.values():
            failed = {**group.failures, "kinds": Counter(group.failures["kinds"])}
            failures.add(Failures(len(group.completions), **failed))
        failures.stop_above(share)

    def _samples(self) -> list[Sample]:
        """Samples in problem order, regardless of the order of sampling."""
        order = {name: place for place, name in enumerate(self._by_id)}
        samples: list[Sample] = []
        taken = dict.fromkeys(order, 0)
        for _, group in sorted(self.groups.items(), key=lambda item: (order[item[0][0]], item[0][1])):
            problem = self._by_id[group.problem]
            for (text, tokens, finished), rewards in zip(group.completions, group.rewards or (), strict=True):
                samples.append(self._sample(problem, taken[problem.id], text, tokens, finished, rewards, group))
                taken[problem.id] += 1
        return samples

    def _sample(
        self,
        problem: Problem,
        number: int,
        text: str,
        tokens: int,
        finished: bool,
        rewards: dict[str, float],
        group: SampledProblem,
    ) -> Sample:
        parts = form_of(problem).parse(text)
        return Sample(
            problem_id=problem.id,
            policy=self.task.policy,
            completion=text,
            reasoning=parts.reasoning,
            summary=parts.summary,
            answer=parts.answer or "",
            rewards=rewards,
            tokens=tokens,
            finish_reason="stop" if finished else "length",
            domain=problem.domain,
            language=problem.language,
            number=number,
            source=problem.source,
            engine=group.engine,
            prompt_tokens=group.prompt_tokens,
        )


def writing_file(path: Path) -> Path:
    """Path of a shard's file until it is complete."""
    return path.with_name(f"writing-{path.stem}")


def seed_of_name(seed: int, name: str, number: int) -> int:
    """A seed for each problem and round, independent of the problem's position."""
    digest = hashlib.blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
