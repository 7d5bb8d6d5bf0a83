"""Asks a teacher general prompts, for answers with a chain of thought (R1, stage 3a)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from grpo.data.records import Problem
from grpo.errors import InputError
from tasks.sft_data.teacher.rewriting import FORM, QUESTION, filled, form_told

ANSWER = f"{FORM}\n\n{QUESTION}"
"""Our wording: the paper does this "by prompting", and its prompt is not published."""


def asked(problems: Sequence[Problem], instruction: str | None = None) -> list[Problem]:
    """The problems with the instruction around the user's last message. Ids and everything else stay the same."""
    text = instruction or ANSWER
    if QUESTION not in text:
        raise InputError(f"sft_data.teacher.instruction has no {QUESTION}; the teacher would not see the prompt")
    requests = []
    for problem in problems:
        *before, last = problem.messages
        told = filled(text, {QUESTION: last["content"], FORM: form_told(problem)})
        requests.append(dataclasses.replace(problem, messages=[*before, {**last, "content": told}]))
    return requests
