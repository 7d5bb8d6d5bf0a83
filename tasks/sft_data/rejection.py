"""Rejection sampling: decides which of a policy's samples become training data (R1, stage 3a).

Rules come first. Then exact duplicates are dropped. Then each problem's samples are drawn at random until enough are
kept. Only drawn samples are shown to the judge, which is the most expensive check. Every dropped sample has a reason.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config.judge import JudgeSettings
from grpo.config.scoring import Scoring
from grpo.data.records import Problem, Sample, read_problems, read_samples, write_rows
from grpo.errors import InputError
from grpo.judging.questions import question_of
from tasks.judges.base import Claim, Judge, Response
from tasks.judges.calibration import has_reference
from tasks.judges.create_judge import make_judge
from tasks.problems.decontaminate import HeldOut
from tasks.sft_data.duplicates import Shingles, completion_digest
from tasks.sft_data.examples import tokenizer_of, with_lengths
from tasks.sft_data.filters import FILTERS, FilterSettings, reject
from tasks.sft_data.given.shards import measured
from tasks.sft_data.problem_filters import PROBLEM_FILTERS, ProblemSamples, reject_problem

KEPT = "kept"
JUDGED = ("judged_incorrect", "judged_unsafe", "judged_poor", "judged_undecided")
REASONS = tuple(dict.fromkeys((*PROBLEM_FILTERS, *FILTERS, "contaminated", "duplicate", *JUDGED)))
"""Every reason that `select` gives before it draws, in order of evaluation."""
REASONS += ("near_duplicate", "surplus")


def select(
    samples: Sequence[Sample],
    problems: Mapping[str, Problem],
    settings: FilterSettings,
    judge: Judge,
    judged: Collection[str],
    keep_per_problem: int,
    *,
    held_out: HeldOut | None = None,
    seed: int = 0,
) -> list[Sample]:
    """The same samples, in the same order, with `verdict` ("kept" or "dropped") and `reason` filled in.

    `samples` must contain all samples of each problem. `judged` names the judge's checks: "reasoning" (is the answer
    correct), "general" (is the response safe), "quality" (is a general response good enough). The result does not
    depend on the order of the samples, as long as their numbers differ. Raises InputError if a sample's problem is
    missing, or a reward that a filter reads.
    """
    groups = _by_problem(samples, problems)
    reasons = _by_rule(samples, groups, problems, settings, held_out)
    _drop_duplicates(samples, groups, problems, reasons)
    draws = []
    for members in groups.values():
        order = sorted((i for i in members if not reasons[i]), key=lambda i: _draw_key(seed, samples[i]))
        draws.append(_Draw(order, samples, settings, keep_per_problem))
    while batch := [i for draw in draws for i in draw.next(reasons)]:
        for i, reason in _judged(batch, samples, problems, judge, judged).items():
            reasons[i] = reason
        for draw in draws:
            draw.settle(reasons)
    return [
        dataclasses.replace(sample, verdict="dropped" if reason else KEPT, reason=reason)
        for sample, reason in zip(samples, reasons, strict=True)
    ]


def _by_problem(samples: Sequence[Sample], problems: Mapping[str, Problem]) -> dict[str, list[int]]:
    """Indices of each problem's samples, sorted by sample number, in whatever order they were sampled."""
    groups: dict[str, list[int]] = {}
    for i in sorted(range(len(samples)), key=lambda i: (samples[i].problem_id, samples[i].number)):
        groups.setdefault(samples[i].problem_id, []).append(i)
    for problem_id in groups:
        if problem_id not in problems:
            raise InputError(f"a sample answers problem {problem_id!r}, which is not among the {len(problems)} given")
    return groups


def _by_rule(
    samples: Sequence[Sample],
    groups: Mapping[str, list[int]],
    problems: Mapping[str, Problem],
    settings: FilterSettings,
    held_out: HeldOut | None,
) -> list[str]:
    reasons = [""] * len(samples)
    quoted = held_out if settings.contamination == "prompts_and_completions" else None
    for problem_id, members in groups.items():
        shared_reason = reject_problem(
            ProblemSamples(problems[problem_id], [samples[i] for i in members], held_out), settings
        )
        for i in members:
            reasons[i] = shared_reason or reject(samples[i], settings) or ""
            if not reasons[i] and quoted and quoted.match_passage(samples[i].completion):
                reasons[i] = "contaminated"
    return reasons


def _drop_duplicates(
    samples: Sequence[Sample], groups: Mapping[str, list[int]], problems: Mapping[str, Problem], reasons: list[str]
) -> None:
    seen: set[int] = set()
    for problem_id, members in groups.items():
        for i in members:
            if reasons[i]:
                continue
            digest = completion_digest(problems[problem_id].text, samples[i].completion)
            reasons[i] = "duplicate" if digest in seen else ""
            seen.add(digest)


def _draw_key(seed: int, sample: Sample) -> bytes:
    # Different from the mix's hash: otherwise the mix would prefer problems that had more samples to draw from.
    name = f"{seed}\0{sample.problem_id}\0{sample.number}"
    return hashlib.blake2b(name.encode(), digest_size=8, person=b"surplus").digest()


class _Draw:
    """Draws at most `room` of one problem's samples that passed the rules, in random order."""

    def __init__(self, order: list[int], samples: Sequence[Sample], settings: FilterSettings, room: int):
        self.waiting, self.samples, self.settings, self.room = order, samples, settings, room
        self.kept: list[int] = []
        self.pending: list[int] = []
        self._shingles: dict[int, Shingles] = {}

    def next(self, reasons: list[str]) -> list[int]:
        """Samples to judge now. A near duplicate of one of them waits, because that one may still be dropped."""
        waiting = []
        for i in self.waiting:
            if self._near(i, self.kept):
                reasons[i] = "near_duplicate"
            elif len(self.kept) == self.room:
                reasons[i] = "surplus"
            elif len(self.kept) + len(self.pending) < self.room and not self._near(i, self.pending):
                self.pending.append(i)
            else:
                waiting.append(i)
        self.waiting = waiting
        return self.pending

    def settle(self, reasons: Sequence[str]) -> None:
        self.kept += [i for i in self.pending if not reasons[i]]
        self.pending = []

    def _near(self, i: int, others: list[int]) -> bool:
        threshold = self.settings.near_duplicate_jaccard
        return threshold is not None and any(self._of(i).near(self._of(j), threshold) for j in others)

    def _of(self, i: int) -> Shingles:
        if i not in self._shingles:
            self._shingles[i] = Shingles(self.samples[i].completion, self.settings.shingle_words)
        return self._shingles[i]


def _judged(
    batch: Sequence[int],
    samples: Sequence[Sample],
    problems: Mapping[str, Problem],
    judge: Judge,
    judged: Collection[str],
) -> dict[int, str]:
    """The judge's reason to drop each sample of the batch; "" if it finds none or is not asked."""
    reasons = dict.fromkeys(batch, "")
    for name, (domain, ask) in _QUESTIONS.items():
        members = [i for i in batch if not reasons[i] and samples[i].domain == domain]
        if domain == "reasoning":  # of others, tests, a scorer or a judge said more than a comparison could
            members = [i for i in members if has_reference(problems[samples[i].problem_id])]
        if name in judged and members:
            reasons |= zip(members, ask(judge, [samples[i] for i in members], problems), strict=True)
    return reasons


def _incorrect(judge: Judge, samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[str]:
    asked = [problems[sample.problem_id] for sample in samples]
    claims = [Claim(question_of(p.messages), p.answer, s.answer) for p, s in zip(asked, samples, strict=True)]
    # Undecided samples are never kept, because nothing shows that they are correct.
    return ["" if verdict == "correct" else f"judged_{verdict}" for verdict in judge.correct_all(claims)]


def _harmful(judge: Judge, samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[str]:
    names = {True: "", False: "judged_unsafe", None: "judged_undecided"}
    return [names[verdict] for verdict in judge.safe_all(_responses(samples, problems))]


def _poor(judge: Judge, samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[str]:
    names = {True: "", False: "judged_poor", None: "judged_undecided"}
    return [names[verdict] for verdict in judge.good_all(_responses(samples, problems))]


def _responses(samples: Sequence[Sample], problems: Mapping[str, Problem]) -> list[Response]:
    return [Response(problems[s.problem_id], s.completion) for s in samples]


_QUESTIONS: dict[str, tuple[str, Callable[[Judge, Sequence[Sample], Mapping[str, Problem]], list[str]]]] = {
    "reasoning": ("reasoning", _incorrect),
    "general": ("general", _harmful),
    "quality": ("general", _poor),
}
"""The judge's checks by name, in order, with the domain of their samples. A sample that fails one skips the next."""


def select_shard(samples: Path, problems: Path, out: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """Runs `select` on one shard in its own process. Writes the samples with verdicts to `out` and returns the judge's
    counts. If `out` already exists, returns the counts stored next to it.

    `settings`: plain values "filters", "judge" (as JSON), "judged", "keep_per_problem", "held_out" (files of problems),
    "seed" and "replies" (folder for the judge's replies). For given examples also "tokenizer", the folder of the
    policy's tokenizer, and "scoring", limits of the check of an answer; they are measured first. For a teacher's
    samples "lengths_by", the same folder: SFT reads neither the teacher's instruction nor its tokens.
    """
    counts_file = out.with_suffix(".json")
    if out.exists() and counts_file.exists():
        stored: dict[str, float] = json.loads(counts_file.read_text())
        return stored
    judge = judge_of(settings["judge"], settings.get("replies"))
    before = judge.counts.to_dict()
    found, known = read_samples(samples), {problem.id: problem for problem in read_problems(problems)}
    if "tokenizer" in settings:
        found = measured(found, known, settings["tokenizer"], Scoring.model_validate(settings["scoring"]))
    if "lengths_by" in settings:
        tokenizer = tokenizer_of(settings["lengths_by"])
        found = [with_lengths(sample, known[sample.problem_id], tokenizer) for sample in found]
    selected = select(
        found,
        known,
        FilterSettings.model_validate(settings["filters"]),
        judge,
        settings["judged"],
        settings["keep_per_problem"],
        held_out=_held_out(*settings["held_out"]),
        seed=settings["seed"],
    )
    counts = {n: v - before.get(n, 0) for n, v in judge.counts.to_dict().items() if v != before.get(n, 0)}
    writing = out.with_suffix(".writing")
    write_rows(writing, selected, Sample)
    counts_file.write_text(json.dumps(counts))
    writing.replace(out)
    return counts


@functools.lru_cache(maxsize=1)
def judge_of(settings: str, replies: str | None = None) -> Judge:
    """The judge with these settings (JSON), one per process, so that a local model is loaded once. `replies`: the
    folder that stores its replies."""
    return make_judge(JudgeSettings.model_validate_json(settings), Path(replies) if replies else None)


@functools.lru_cache(maxsize=1)
def _held_out(*files: str) -> HeldOut:
    return HeldOut(*(read_problems(Path(file)) for file in files))
