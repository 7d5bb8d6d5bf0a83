"""Reads test sets as problems, and puts each problem into the prompt form that its set asks for."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo.data.records import Problem
from grpo.data.template import STYLE_FIELD, AnswerStyle, form_of, with_style
from grpo.errors import InputError
from tasks.evaluation.sets.forms import FORMS
from tasks.evaluation.sets.known import KnownSet
from tasks.evaluation.sets.settings import FILES, NO_CONSTRAINTS, EvaluationSet, SetData
from tasks.problems.constraints import read_constraints
from tasks.problems.load import LoadResult, load
from tasks.problems.sources import FileSource, HubSource

logger = logging.getLogger(__name__)

_MARK: dict[AnswerStyle, str] = {
    "tags": "between <answer> and </answer>",
    "boxed": r"within \boxed{}",
    "auto": r"within \boxed{}",
}
_ASKS = {
    "code": "Please reason step by step, and put the whole program into one ```python block{mark}.",
    "choice": "Please reason step by step, and put the letter of the right choice{mark}.",
    "none": "",
}
_ASK = "Please reason step by step, and put your final answer{mark}."


def load_set(of: SetData, seed: int) -> LoadResult:
    """All problems of a test set.

    Raises:
        InputError: it cannot be read, a row lacks columns of its form, or nothing can check its answers; the message
            starts with the set's name.
    """
    try:
        if of.source is not None:
            return _with_checks(of, load(of.source, seed))
        assert of.known is not None
        return load(_source(of, of.known), seed, _reshape(of.known))
    except InputError as error:
        raise InputError(f"test set {of.name!r}: {error}") from None


def _with_checks(of: SetData, read: LoadResult) -> LoadResult:
    """Without problems outside the domain "reasoning" that have no constraints: they are bad records."""
    checked, bad = list[Problem](), list[str]()
    for problem in read.problems:
        if problem.domain == "reasoning" or problem.metadata.get("constraints"):
            checked.append(problem)
        else:
            bad.append(f"problem {problem.id}: {NO_CONSTRAINTS}")
    if bad and (not checked or getattr(of.source, "on_bad_record", "stop") == "stop"):
        raise InputError(bad[0])
    counts = {"bad_records": read.counts["bad_records"] + len(bad), "kept": len(checked)}
    return LoadResult(checked, read.counts | counts, [*read.bad_records, *bad])


def _source(of: SetData, known: KnownSet) -> FileSource | HubSource:
    columns: dict[str, Any] = {"prompt_column": known.prompt, "answer_column": known.answer}
    if known.form != "answer":
        columns = {"prompt_column": "question", "answer_column": "answer"}
    if known.form == "tests":
        columns["metadata_columns"] = ["tests", "code_grading"]
    if known.form == "constraints":  # some of IFEval's instructions have no rule here; their prompts are dropped
        columns |= {"metadata_columns": ["constraints"], "domain": "general", "on_bad_record": "skip"}
    columns["verifier"] = known.verifier
    if of.path is not None and of.path.lower().endswith(FILES):
        return FileSource(path=Path(of.path).expanduser(), **columns)
    if of.path is None:  # nobody here can mend the hub's rows, such as two that contradict each other
        columns["on_bad_record"] = "skip"
    return HubSource(name=of.path or known.hub or "", config=known.config, split=known.split, **columns)


def _reshape(known: KnownSet) -> Callable[[str, dict[str, Any]], dict[str, Any]] | None:
    form = FORMS.get(known.form)
    return None if form is None else lambda where, row: form(known, where, row)


def asked(of: EvaluationSet, problems: Sequence[Problem]) -> list[Problem]:
    """The problems to ask, in the set's prompt style and answer style.

    Leaves out those whose constraints cannot be checked, with a warning: earlier versions stored some.

    Raises:
        InputError: a problem has no constraints, and no verifier checks it.
    """
    chosen = [problem for problem in problems if _checkable(of, problem)][: of.problems]
    for problem in chosen:
        if problem.domain != "reasoning" and not read_constraints(problem.metadata):
            raise InputError(f"test set {of.name!r}: problem {problem.id}: {NO_CONSTRAINTS}")
    if of.answer_style is not None:
        chosen = [_styled(problem, of.answer_style) for problem in chosen]
    return [_phrased(problem, of.prompt_style) for problem in chosen]


def _checkable(of: EvaluationSet, problem: Problem) -> bool:
    try:
        read_constraints(problem.metadata)
    except InputError as error:
        logger.warning("test set %r: problem %s is left out: %s", of.name, problem.id, error)
        return False
    return True


def _styled(problem: Problem, style: AnswerStyle) -> Problem:
    metadata = {name: value for name, value in problem.metadata.items() if name != STYLE_FIELD}
    return with_style(dataclasses.replace(problem, metadata=metadata), style)


def _phrased(problem: Problem, style: str) -> Problem:
    if style == "question":
        return problem
    text = "{question}" + _instruction(problem) if style == "instruction" else style
    *before, last = problem.messages
    content = text.replace("{question}", last["content"])
    return dataclasses.replace(problem, messages=[*before, {**last, "content": content}])


def _instruction(problem: Problem) -> str:
    form = form_of(problem)
    mark = "" if form.whole and form.style != "tags" else f" {_MARK[form.style]}"  # a program is not boxed
    ask = _ASKS.get(problem.verifier, _ASK).replace("{mark}", mark)
    return f"\n\n{ask}" if ask else ""
