"""Rewrites R1-Zero's trajectories into a readable chain of thought and a summary (R1, stage 1).

R1-Zero's right answers are hard to read: they mix languages and are not addressed to a reader. In the paper,
DeepSeek-V3 rewrites them and people check them. Here a teacher rewrites them; its output passes the same filters, and
must be right again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo.data.records import Problem, Sample
from grpo.data.template import form_of
from grpo.errors import InputError
from grpo.judging.questions import question_of
from tasks.sft_data.examples import example
from tasks.sft_data.filters import FilterSettings, reject

QUESTION, TRAJECTORY, FORM = "{question}", "{trajectory}", "{form}"
INSTRUCTION = f"""\
Below are a question and a solution by a model whose notes are right but hard to read. Rewrite the solution for a
reader, in the language of the question. Keep every step of the thought that is needed, in the first person, in whole
sentences and short paragraphs; leave out repetitions, other languages and formatting. Do not change the result.

{FORM}

Question:
{QUESTION}

Solution:
{TRAJECTORY}"""
"""Our wording; the paper's prompt is not published in full."""
FORMS = {
    "tags": "Write the thought between <think> and </think>, then only the result between <answer> and </answer>.",
    "boxed": "Write the thought between <think> and </think>, then a summary of a few sentences that explains the "
    "solution to the reader and ends with the result in \\boxed{}.",
    "summary": "Write the thought between <think> and </think>, then the answer for the reader.",
}
"""Answer style -> the form in words for a teacher (`auto` uses boxed). summary: if nothing is boxed."""
_LONGEST = 200_000  # maximum characters of a trajectory


def trajectories(samples: Iterable[Sample], settings: FilterSettings) -> tuple[dict[str, Sample], dict[str, int]]:
    """The first right and readable sample of each problem, and counts of all samples by reason."""
    chosen: dict[str, Sample] = {}
    reasons: Counter[str] = Counter()
    for sample in samples:
        reason = reject(sample, settings) or ("surplus" if sample.problem_id in chosen else None)
        reasons[reason or "chosen"] += 1
        if reason is None:
            chosen[sample.problem_id] = sample
    return chosen, {f"trajectories_{reason}": count for reason, count in reasons.items()}


def requests(
    problems: Sequence[Problem], chosen: Mapping[str, Sample], instruction: str | None = None
) -> list[Problem]:
    """The problems with a request to rewrite their trajectory as the prompt. Everything else is unchanged."""
    text = instruction or INSTRUCTION
    if missing := [name for name in (QUESTION, TRAJECTORY) if name not in text]:
        raise InputError(f"cold_start_data.rewriter.instruction has no {missing[0]}; the rewriter would not see it")
    return [
        dataclasses.replace(
            problem, messages=[{"role": "user", "content": _request(text, problem, chosen[problem.id])}]
        )
        for problem in problems
        if problem.id in chosen
    ]


def form_told(problem: Problem) -> str:
    """The form of a completion to the problem, described to a teacher."""
    form = form_of(problem)
    return FORMS["tags" if form.style == "tags" else "summary" if form.whole else "boxed"]


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced in one pass, so that braces in a model's text are left alone."""
    for name in values:
        text = text.replace(name, f"\0{name}\0")
    return "".join(values.get(piece, piece) for piece in text.split("\0"))


def _request(text: str, problem: Problem, sample: Sample) -> str:
    question = question_of(problem.messages)
    return filled(text, {QUESTION: question, TRAJECTORY: sample.completion[:_LONGEST], FORM: form_told(problem)})


Rewrite = Callable[[Problem], Sample | None]
"""Problem -> the rewritten completion as a scored sample; None if there is none."""


def rewritten(
    problems: Sequence[Problem], chosen: Mapping[str, Sample], rewrite: Rewrite, settings: FilterSettings
) -> tuple[list[Any], dict[str, int]]:
    """(examples, counts by reason) of rewritten trajectories that pass the filters and are right again.

    An example keeps the trajectory in the column `original`, for inspection. Its prompt is the trajectory's, whose
    tokens the filters count, not those of the longer request to the teacher.
    """
    examples = []
    reasons: Counter[str] = Counter()
    for problem in problems:
        if problem.id not in chosen:
            continue
        original, sample = chosen[problem.id], rewrite(problem)
        if sample is None:
            reasons["rewritten_missing"] += 1
            continue
        reason = reject(dataclasses.replace(sample, prompt_tokens=original.prompt_tokens), settings)
        reasons[f"rewritten_{reason}" if reason else "kept"] += 1
        if reason is None:
            examples.append({**example(problem, sample.completion), "original": original.completion})
    return examples, dict(reasons)
