"""Problems: reads the sources, holds some out by the hash of their normal form, removes leaking training prompts."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.recipe.sections import Problems
from flows.stage_contract.stage import Context, Outcome, Stage
from grpo.data.records import Problem, read_problems, write_rows
from grpo.data.template import with_style
from grpo.errors import InputError
from tasks.evaluation.sets.load import load_set
from tasks.evaluation.sets.settings import SetData
from tasks.problems.decontaminate import Collision, decontaminate
from tasks.problems.load import drop_duplicates, load, split
from tasks.problems.miniature.everyday import (
    EVERYDAY_VERSION,
    EverydaySource,
    held_out_seen,
    load_everyday,
    load_held_out,
)
from tasks.problems.miniature.sums import SUMS_VERSION, SumsSource, load_sums
from tasks.problems.normal_form import HELD_OUT as SALT
from tasks.problems.normal_form import normal_form, normalise
from tasks.problems.rows import ROWS_VERSION
from tasks.problems.sources import FileSource, HubSource
from tasks.sft_data.statistics import prompt_text

logger = logging.getLogger(__name__)

SHOWN = 100
TRAIN, VALIDATION, HELD_OUT = "train.parquet", "validation.parquet", "held_out.parquet"
BAD_RECORDS, TEST_SETS = "bad_records.jsonl", "test_sets"
DOMAINS = ("reasoning", "general")


def build(context: Context) -> Outcome:
    """Writes the training and held-out problems as parquet files."""
    config: Problems = context.config
    problems: list[Problem] = []
    by_source: dict[str, bool] = {}  # id -> whether it is held out, if the source itself says so
    counts: dict[str, int] = {}
    bad: list[dict[str, Any]] = []
    show = context.progress.of("")
    for number, source in enumerate(config.sources):
        if isinstance(source, EverydaySource):
            result, evaluated = load_everyday(source, context.seed), load_held_out(source, context.seed)
            by_source |= dict.fromkeys((p.id for p in result.problems), False)
            by_source |= dict.fromkeys((p.id for p in evaluated), True)
            result.problems.extend(evaluated)
        elif isinstance(source, SumsSource):
            result = load_sums(source, context.seed)
        else:
            result = load(source, context.seed)
        style = source.answer_style or config.answer_style
        problems += [with_style(problem, style) for problem in result.problems]
        bad += [{"source": number, "fault": fault} for fault in result.bad_records]
        counts |= {f"source{number}_{name}": count for name, count in result.counts.items()}
        show(number + 1, len(config.sources))
    problems, counts["duplicates_across_sources"] = drop_duplicates(problems)
    # Later stages take the first N problems, which must be a fair sample of all sources.
    random.Random(f"problems/{context.seed}").shuffle(problems)
    train: list[Problem] = []
    validation: list[Problem] = []
    held_out: list[Problem] = []
    for domain in DOMAINS:
        of_domain = [p for p in problems if p.domain == domain]
        learn, keep = _divide(of_domain, by_source, config)
        learn, validate = split(learn, config.validation_share, salt="r1flow validation")
        train, validation, held_out = train + learn, validation + validate, held_out + keep
        counts |= {f"{domain}_held_out": len(keep)}
    if config.validation_share:
        validation, _, _ = _apart(config, validation, held_out)
        train, removed, _ = _apart(config, train, validation)
        counts |= {f"validation_{name}": removed[name] for name in ("equal", "overlapping")}
    train, removed, examples = _apart(config, train, held_out)
    counts |= {f"decontamination_{name}": count for name, count in removed.items()}
    for of in config.test_sets:
        tested, faults = _write_test_set(context, of)
        train, removed, more = _apart(config, train, tested)
        validation, _, _ = _apart(config, validation, tested)
        examples += more
        bad += [{"test_set": of.name, "fault": fault} for fault in faults]
        found = {"problems": len(tested), "left_out": len(faults)} | {n: removed[n] for n in ("equal", "overlapping")}
        counts |= {f"test_{of.name}_{name}": count for name, count in found.items()}
    if config.test_sets and not train:
        raise InputError("problems: no training problem is left beside the test sets; do not train on them")
    forms = {normal_form(problem.text) for problem in held_out}
    counts["shared_with_held_out"] = sum(normal_form(problem.text) in forms for problem in train)
    if by_source:
        counts["everyday_held_out_seen"] = held_out_seen(problem.text for problem in train)
    counts |= {f"{domain}_train": sum(p.domain == domain for p in train) for domain in DOMAINS}
    if config.validation_share:
        counts |= {f"{domain}_validation": sum(p.domain == domain for p in validation) for domain in DOMAINS}
        write_rows(context.out / VALIDATION, validation, Problem)
    write_rows(context.out / TRAIN, train, Problem)
    write_rows(context.out / HELD_OUT, held_out, Problem)
    collisions = [{"train": c.train_id, "held_out": c.held_out_id, "shared": c.shared} for c in examples]
    (context.out / "decontamination.json").write_text(json.dumps(collisions, indent=2, ensure_ascii=False))
    if bad:
        logger.warning("%d bad records skipped, the first: %s", len(bad), bad[0]["fault"])
        (context.out / BAD_RECORDS).write_text("".join(json.dumps(b, ensure_ascii=False) + "\n" for b in bad))
    shown: list[dict[str, Any]] = [
        {"id": p.id, "domain": p.domain, "language": p.language, "prompt": p.text, "answer": p.answer}
        for p in train[:20]
    ]
    return Outcome(counts=counts, tables={"problems": shown} | ({"bad_records": bad[:SHOWN]} if bad else {}))


def _divide(
    problems: list[Problem], by_source: Mapping[str, bool], config: Problems
) -> tuple[list[Problem], list[Problem]]:
    """(train, held out), each in the given order. The source decides, or else the hash of the normal form."""
    undivided = [problem for problem in problems if problem.id not in by_source]
    learn, keep = split(undivided, config.held_out_share, salt=SALT, held_out_max=config.held_out_max)
    held_out = {**by_source, **{p.id: False for p in learn}, **{p.id: True for p in keep}}  # the surplus is in neither
    return (
        [p for p in problems if held_out.get(p.id) is False],
        [p for p in problems if held_out.get(p.id) is True],
    )


def _apart(
    config: Problems, problems: list[Problem], others: list[Problem]
) -> tuple[list[Problem], dict[str, int], list[Collision]]:
    """The problems that share no n-gram with the others, counts of those that do, and examples of them."""
    return decontaminate(problems, others, config.ngram, boilerplate_share=config.boilerplate_share)


def _write_test_set(context: Context, of: SetData) -> tuple[list[Problem], list[str]]:
    """The problems of a test set, and the reason for each row that was left out."""
    loaded = load_set(of, context.seed)
    style = of.source.answer_style if of.source and of.source.answer_style else context.config.answer_style
    tested = [with_style(problem, style) for problem in loaded.problems]
    (context.out / TEST_SETS).mkdir(exist_ok=True)
    write_rows(test_set_file(context.out, of.name), tested, Problem)
    return tested, loaded.bad_records


def files(config: Problems) -> dict[str, str | Path]:
    """Local files and folders that the sources read."""
    paths: dict[str, str | Path] = {}
    for number, source in enumerate(config.sources):
        if isinstance(source, FileSource):
            paths[f"source{number}"] = source.path
        elif isinstance(source, HubSource):
            paths[f"source{number}"] = source.name
    return paths | set_files(config.test_sets)


def set_files(sets: Sequence[SetData]) -> dict[str, str | Path]:
    """Local files and folders that test sets read, and their hub names."""
    return {f"test_{of.name}": of.local for of in sets if of.local is not None}


def test_set_file(artifact: Path, name: str) -> Path:
    """The file with a test set's problems in an artifact of this stage."""
    return artifact / TEST_SETS / f"{name}.parquet"


def evaluated_files(artifact: Path) -> list[Path]:
    """Files in an artifact of this stage with the problems that no training text may contain: the held-out ones, and
    one file for each test set."""
    return [artifact / HELD_OUT, *sorted((artifact / TEST_SETS).glob("*.parquet"))]


def unevaluated(rows: Sequence[dict[str, Any]], artifact: Path) -> list[dict[str, Any]]:
    """The rows, such as preferences, whose `messages` ask no prompt of the evaluation."""
    evaluated = {normalise(problem.text) for problem in read_problems(evaluated_files(artifact))}
    return [row for row in rows if normalise(prompt_text(row["messages"])) not in evaluated]


def code(config: Problems) -> dict[str, Any]:
    """What decides the result in addition to the settings: the entries used from the table of known test sets; the
    versions of the miniature world's general prompts and sums, if used; and the version of the row reader, if there are
    rows."""
    known = {of.name: asdict(of.known) for of in config.test_sets if of.known is not None}
    everyday = any(isinstance(source, EverydaySource) for source in config.sources)
    sums = any(isinstance(source, SumsSource) for source in config.sources)
    rows = config.test_sets or any(isinstance(source, FileSource | HubSource) for source in config.sources)
    return (
        ({"known_sets": known} if known else {})
        | ({"everyday": EVERYDAY_VERSION} if everyday else {})
        | ({"sums": SUMS_VERSION} if sums else {})
        | ({"rows": ROWS_VERSION} if rows else {})
    )


STAGE = Stage("problems", 5, (), build, files=files, extra=code)
