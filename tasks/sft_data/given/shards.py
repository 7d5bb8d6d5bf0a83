"""Shards of a mix source: turns its rows into problems and samples, so that the filters for sampled ones apply.

Rows are streamed; memory holds one shard.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config.scoring import Scoring
from grpo.data.records import Message, Problem, Sample, write_rows
from grpo.data.template import (
    TAG,
    AnswerStyle,
    Parts,
    after_reasoning,
    form_of,
    last_box,
    with_style,
)
from grpo.errors import InputError
from grpo.rewards.language import language_consistency
from grpo.rewards.verifiers import time_limit_s, verify
from tasks.problems.rows import final_answer
from tasks.sft_data.examples import tokenizer_of, with_lengths
from tasks.sft_data.given.rows import read_example, source_rows
from tasks.sft_data.given.settings import MixSource
from tasks.store.whole_file import write_whole
from tasks.trainer.processes import Failure, Pool

logger = logging.getLogger(__name__)

_END_OF_THOUGHT = re.compile(r"</(?:think|reasoning)>")
GIVEN = "given"
"""Value of `policy` and `engine` in these samples."""


@dataclasses.dataclass(frozen=True)
class GivenShard:
    """Files with the problems and the samples of some consecutive rows. The samples are not measured yet."""

    source: MixSource
    problems: Path
    samples: Path


@dataclasses.dataclass
class Taken:
    """A source in shards. `counts`: rows = taken + bad_records. `bad_records`: what is wrong with each, and its
    place."""

    shards: list[GivenShard]
    counts: dict[str, int]
    bad_records: list[str]


def take(source: MixSource, folder: Path, size: int, style: AnswerStyle = "tags") -> Taken:
    """Writes a source's rows into shards of at most `size` in `folder`. A second call returns what the first wrote.
    `style`: the form into which chains of thought and their answers are converted.

    Raises InputError for the first bad record, unless bad records are skipped, and if no row is good.
    """
    done = folder / "taken.json"
    found = _read(done)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        bad: list[str] = []
        rows: list[tuple[Problem, Sample]] = []
        taken = written = 0
        for row in _examples(source, style, bad):
            rows.append(row)
            taken += 1
            if len(rows) == size:
                _write(rows, *_paths(folder, written))
                rows, written = [], written + 1
        if rows:
            _write(rows, *_paths(folder, written))
        if not taken:
            first = f", the first: {bad[0]}" if bad else ""
            raise InputError(f"mix source {source.name!r}: no usable row, {len(bad)} bad ones{first}")
        counts = {"rows": taken + len(bad), "taken": taken, "bad_records": len(bad)}
        found = {"counts": counts, "bad_records": bad}
        write_whole(done, json.dumps(found, ensure_ascii=False))
    shards = -(-found["counts"]["taken"] // size)
    return Taken([GivenShard(source, *_paths(folder, n)) for n in range(shards)], found["counts"], found["bad_records"])


def _read(done: Path) -> dict[str, Any] | None:
    """What a call wrote when all shards were there; None if none did, or if it was killed while it wrote."""
    try:
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found


def _examples(source: MixSource, style: AnswerStyle, bad: list[str]) -> Iterator[tuple[Problem, Sample]]:
    for number, (where, row) in enumerate(source_rows(source)):
        try:
            if isinstance(row, InputError):
                raise row
            messages, completion, answer = read_example(source, row, where)
        except InputError as error:
            if source.on_bad_record == "stop":
                raise
            bad.append(str(error))
            continue
        yield _example(source, style, number, messages, completion, answer)


def _example(
    source: MixSource, style: AnswerStyle, number: int, messages: list[Message], completion: str, answer: str
) -> tuple[Problem, Sample]:
    """`number` is the row's number in its source. Rows with the same prompt and reference get the same problem id."""
    identity = json.dumps([source.name, messages, *([answer] if answer else [])], ensure_ascii=False)
    problem = Problem(
        id=hashlib.sha256(identity.encode()).hexdigest()[:16],
        messages=messages,
        answer=answer,
        verifier=source.verifier if answer else "none",
        domain=source.domain,
        language=source.language,
        source=source.name,
    )
    problem = with_style(problem, style)
    text, parts = _in_form(problem, completion.strip())
    sample = Sample(
        problem_id=problem.id,
        policy=GIVEN,
        completion=text,
        reasoning=parts.reasoning,
        summary=parts.summary,
        answer=parts.answer or "",
        rewards={},
        tokens=0,
        finish_reason="stop",
        domain=source.domain,
        language=source.language,
        number=number,
        source=source.name,
        engine=GIVEN,
    )
    return problem, sample


def _in_form(problem: Problem, completion: str) -> tuple[str, Parts]:
    """A completion with its parts. If it has a thought and an answer, they are converted into the problem's form."""
    form = form_of(problem)
    parts = form.parse(completion)
    if _is_complete(completion, parts) and not parts.well_formed:
        summary = after_reasoning(completion)
        answer = last_box(summary) or parts.answer or summary
        completion = form.render(parts.reasoning, answer, summary)
        parts = form.parse(completion)
    return completion, parts


def _is_complete(completion: str, parts: Parts) -> bool:
    """Whether there is exactly one chain of thought, which ends and is followed by text."""
    return bool(parts.reasoning and parts.summary and len(_END_OF_THOUGHT.findall(completion)) == 1)


def measured(
    samples: Sequence[Sample], problems: Mapping[str, Problem], tokenizer_folder: str, scoring: Scoring
) -> list[Sample]:
    """The samples with the rewards that filters read, with the answer that earned the accuracy, which is what a judge
    compares, and with lengths measured by the policy's tokenizer. `scoring`: limits of the check of one answer."""
    tokenizer = tokenizer_of(tokenizer_folder)
    return [
        with_lengths(_scored(sample, problems[sample.problem_id], scores), problems[sample.problem_id], tokenizer)
        for sample, scores in zip(samples, _scores(samples, problems, scoring), strict=True)
    ]


def _scored(sample: Sample, problem: Problem, scores: Mapping[str, float]) -> Sample:
    answer = max(scores, key=scores.__getitem__, default=sample.answer)
    accuracy = {"accuracy": scores[answer]} if scores else {}
    return dataclasses.replace(sample, answer=answer, rewards=_rewards(sample, problem) | accuracy)


def _rewards(sample: Sample, problem: Problem) -> dict[str, float]:
    """Without a chain of thought, there is no format to check and no language of it to measure."""
    text = sample.completion
    complete = _is_complete(text, form_of(problem).parse(text))
    return {
        "format": float(TAG.search(text) is None or complete),
        "language": language_consistency(sample.reasoning, sample.language) if sample.reasoning else 1.0,
    }


def _scores(samples: Sequence[Sample], problems: Mapping[str, Problem], scoring: Scoring) -> list[dict[str, float]]:
    """The accuracy of each possible answer of each sample of domain reasoning, {} of the others. Computed in a process
    that can be killed, because verifiers do not limit their own time. An answer whose check fails is wrong."""
    answers = [_answers(sample) for sample in samples]
    if not any(answers):
        return [{} for _ in samples]
    with Pool(1, scoring.time_limit_s, int(scoring.memory_gb * 1e9)) as pool:
        checks = [
            [pool.submit_within(time_limit_s(problem), verify, problem, answer) for answer in answers_of_sample]
            for problem, answers_of_sample in zip((problems[s.problem_id] for s in samples), answers, strict=True)
        ]
        found = [[check.result() for check in of_sample] for of_sample in checks]
    failures = [value for values in found for value in values if isinstance(value, Failure)]
    if failures:
        message = "the check of %d given answers failed, so they count as wrong; the first: %s"
        logger.warning(message, len(failures), failures[0].message)
    scores = [[0.0 if isinstance(value, Failure) else value for value in values] for values in found]
    return [dict(zip(of_sample, values, strict=True)) for of_sample, values in zip(answers, scores, strict=True)]


def _answers(sample: Sample) -> list[str]:
    """The texts of a reasoning sample that may be its answer, without repetition, that in the form's place first."""
    if sample.domain != "reasoning":
        return []
    return list(dict.fromkeys([sample.answer, last_box(sample.summary) or final_answer(sample.summary)[0]]))


def _write(rows: Sequence[tuple[Problem, Sample]], problems: Path, samples: Path) -> None:
    write_rows(problems, list({problem.id: problem for problem, _ in rows}.values()), Problem)
    write_rows(samples, [sample for _, sample in rows], Sample)


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number:05d}.problems.parquet", folder / f"{number:05d}.samples.parquet"
