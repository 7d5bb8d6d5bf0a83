"""Loads problem sets from their sources, and decides which problems are held out.

`load` reads a source into `Problem`s and counts what was dropped. `split` decides by the prompt's normal form alone, so
the same problem is never on both sides, whatever its order, source or wording.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.processes.pool import Pool
from grpo.rewards.verifiers import COMPARING, QUICK, agree, may_take_long, verify
from grpo.validate import MEMORY_BYTES, TIME_LIMIT_S, validate
from tasks.problems.files import rows
from tasks.problems.normal_form import normal_form, normalise, place
from tasks.problems.reasoning_gym import generate
from tasks.problems.rows import read_row
from tasks.problems.sources import FileSource, HubSource, ReasoningGymSource, label, short


@dataclass(frozen=True)
class LoadResult:
    """Problems with pairwise different texts. `counts`: read = kept + duplicates + unverifiable + bad_records.
    `bad_records`: what is wrong with each, and its place."""

    problems: list[Problem]
    counts: dict[str, int]
    bad_records: list[str]


Reshape = Callable[[str, dict[str, Any]], dict[str, Any]]
"""(place, columns) of a row -> the columns that the source's settings name."""


def load(source: ReasoningGymSource | FileSource | HubSource, seed: int, reshape: Reshape | None = None) -> LoadResult:
    """Reads a source. `seed` is the run's; it matters only if problems are generated. `reshape` is applied to each row.

    "unverifiable" counts generated problems whose own scorer does not accept their own gold answer: a fault of the
    generator. In a file, this is the author's fault and therefore a bad record, which raises or is skipped, depending
    on the source's `on_bad_record`.
    """
    candidates: list[Problem] = []
    bad: list[str] = []
    unverifiable = 0
    if isinstance(source, ReasoningGymSource):
        for problem in generate(source, seed):
            if problem.answer and verify(problem, problem.answer) < 1.0:
                unverifiable += 1
            else:
                candidates.append(problem)
    else:
        placed = _with_right_answers(source, [*_read(source, bad, reshape)], bad)
        candidates = _without_contradictions(source, placed, bad)
    problems, duplicates = drop_duplicates(candidates)
    read = len(candidates) + unverifiable + len(bad)
    if not problems:
        why = f", {len(bad)} of them bad records, the first: {bad[0]}" if bad else f" ({unverifiable} unverifiable)"
        raise InputError(f"{label(source)}: no problem left of {read} read{why}")
    dropped = {"duplicates": duplicates, "unverifiable": unverifiable, "bad_records": len(bad)}
    return LoadResult(problems, {"read": read, **dropped, "kept": len(problems)}, bad)


Placed = tuple[str, Problem]
"""A row's place, for messages, and its problem."""


def _read(source: FileSource | HubSource, bad: list[str], reshape: Reshape | None) -> Iterator[Placed]:
    read = 0
    for where, row in rows(source):
        if read == source.limit:
            break
        read += 1
        try:
            if isinstance(row, InputError):
                raise row
            problem = read_row(source, where, reshape(where, row) if reshape else row)
        except InputError as error:
            if source.on_bad_record == "stop":
                raise
            bad.append(str(error))
            continue
        yield where, problem
    if read == 0:
        raise InputError(f"{label(source)}: there are no rows")


def _with_right_answers(source: FileSource | HubSource, placed: list[Placed], bad: list[str]) -> list[Placed]:
    """Checks the answers that take long: whether solutions pass their tests, and whether doubtful golds of "math" can
    be used. Runs in parallel, in processes that can be killed."""
    checked = validate([problem for _, problem in placed if may_take_long(problem)])
    findings = {finding.problem_id: finding.what for finding in checked}
    wrong = [(where, problem) for where, problem in placed if problem.id in findings]
    _report([f"{where}: problem {short(p.text)}: {findings[p.id]}" for where, p in wrong], source, bad)
    return [(where, problem) for where, problem in placed if problem.id not in findings]


def _without_contradictions(source: FileSource | HubSource, placed: list[Placed], bad: list[str]) -> list[Problem]:
    """The problems without those that ask for the same as an earlier row and have another answer, by its verifier."""
    first: dict[str, Placed] = {}
    kept, unsure = [], []
    for where, problem in placed:
        there, earlier = first.setdefault(normalise(problem.text), (where, problem))
        if problem.answer == earlier.answer or earlier.verifier not in COMPARING:
            kept.append(problem)
        else:
            unsure.append((where, problem, there, earlier))
    faults = []
    equal = _agreements([(earlier, problem.answer) for _, problem, _, earlier in unsure])
    for (where, problem, there, earlier), same in zip(unsure, equal, strict=True):
        if same:
            kept.append(problem)
        else:
            answers = f"{short(problem.answer)}, but {short(earlier.answer)} at {there}"
            faults.append(f"{where}: problem {short(problem.text)} has the answer {answers}")
    _report(faults, source, bad)
    return kept


def _agreements(pairs: Sequence[tuple[Problem, str]]) -> list[bool]:
    """Whether an answer equals its problem's own. Verifiers that are not quick run in processes that can be killed; if
    one fails there, the answers count as different."""
    if all(problem.verifier in QUICK for problem, _ in pairs):
        return [agree(problem, answer, problem.answer) for problem, answer in pairs]
    with Pool(min(len(pairs), os.cpu_count() or 1), TIME_LIMIT_S, MEMORY_BYTES) as pool:
        found = [pool.submit(agree, problem, answer, problem.answer) for problem, answer in pairs]
        return [future.result() is True for future in found]


def _report(faults: list[str], source: FileSource | HubSource, bad: list[str]) -> None:
    """Adds faults to the bad records. Raises InputError for the first, unless bad records are skipped."""
    if faults and source.on_bad_record == "stop":
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InputError(f"{faults[0]}{more}; mend or remove it")
    bad += faults


def drop_duplicates(problems: Iterable[Problem]) -> tuple[list[Problem], int]:
    """The first problem of each text, in order, and how many were dropped. Can also be used on the union of several
    sources."""
    first: dict[str, Problem] = {}
    total = 0
    for problem in problems:
        total += 1
        first.setdefault(normalise(problem.text), problem)
    return list(first.values()), total - len(first)


def split(
    problems: Sequence[Problem],
    held_out_share: float,
    salt: str,
    *,
    held_out_min: int = 0,
    held_out_max: int | None = None,
) -> tuple[list[Problem], list[Problem]]:
    """Returns (train, held_out), each in the given order.

    A problem is held out if the salted hash of its normal form, as a number in [0, 1), is below `held_out_share`.
    Beyond `held_out_max`, those with the largest hashes are dropped, not moved to train: otherwise one run would train
    on them and another would hold them out. For the same reason, fewer than `held_out_min` is an error.
    """
    if not 0 <= held_out_share <= 1:
        raise InputError(f"held_out_share is {held_out_share}; it is a share between 0 and 1")
    if held_out_max is not None and held_out_max < held_out_min:
        raise InputError(f"held_out_max {held_out_max} is less than held_out_min {held_out_min}")
    places = [place(normal_form(problem.text), salt) for problem in problems]
    train = [problem for problem, p in zip(problems, places, strict=True) if p >= held_out_share]
    held_out = [(p, problem) for problem, p in zip(problems, places, strict=True) if p < held_out_share]
    if len(held_out) < held_out_min:
        raise InputError(
            f"{len(held_out)} of {len(problems)} problems are held out, fewer than held_out_min {held_out_min}; raise "
            f"held_out_share ({held_out_share}) or add problems"
        )
    if held_out_max is not None and len(held_out) > held_out_max:
        chosen = {problem.id for _, problem in sorted(held_out, key=lambda x: (x[0], x[1].id))[:held_out_max]}
        held_out = [(p, problem) for p, problem in held_out if problem.id in chosen]
    return train, [problem for _, problem in held_out]
