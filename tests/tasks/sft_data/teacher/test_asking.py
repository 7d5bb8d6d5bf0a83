"""The request to a teacher for a general prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo.data.template import with_style
from grpo.errors import InputError
from tasks.sft_data.teacher.asking import asked


@pytest.mark.parametrize(("style", "told"), [("tags", "</answer>"), ("boxed", "then the answer for the reader.")])
def test_the_form_stands_before_the_last_message(style: Any, told: str, problem: Callable[..., Any]) -> None:
    given = with_style(problem(text="Say {form}", domain="general", verifier="none", answer=""), style)
    (request,) = asked([given])
    form, said = request.messages[-1]["content"].split("\n\n")
    assert form.startswith("Write the thought between <think> and </think>") and told in form
    assert said == "Say {form}" and (request.id, request.metadata) == (given.id, given.metadata)
    (own,) = asked([given], "Briefly: {question}")
    assert own.messages == [{"role": "user", "content": "Briefly: Say {form}"}]


def test_an_instruction_without_the_question_is_refused(problem: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"sft_data.teacher.instruction has no \{question\}"):
        asked([problem()], "Answer briefly.")
