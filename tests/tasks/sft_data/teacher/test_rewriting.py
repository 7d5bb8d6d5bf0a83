"""Rewriting: which trajectories are taken, what the rewriter reads, and which rewritten ones become examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from flows.recipe.data_sections import ColdStartData
from grpo.data.records import Problem, Sample
from grpo.data.template import with_style
from grpo.errors import InputError
from tasks.sft_data.cold_start import as_sample
from tasks.sft_data.examples import example, shown_examples, write_examples
from tasks.sft_data.filters import FilterSettings
from tasks.sft_data.teacher.rewriting import requests, rewritten, trajectories
from tasks.sft_data.teacher.settings import Teacher

Make = Callable[..., Any]


def test_the_first_right_and_readable_trajectory_of_a_problem_is_taken(sample: Make) -> None:
    mixed = {"format": 1.0, "language": 0.4, "accuracy": 1.0}
    samples = [
        sample("a", accuracy=0.0, number=0),
        sample("a", number=1, rewards=mixed),
        sample("a", number=2, reasoning="one and two"),
        sample("a", number=3),
        sample("b", number=0, finish_reason="length"),
    ]
    chosen, counts = trajectories(samples, FilterSettings(language_min=0.9))
    assert {name: taken.number for name, taken in chosen.items()} == {"a": 2}
    assert counts == {
        **{"trajectories_incorrect": 1, "trajectories_mixed_language": 1, "trajectories_chosen": 1},
        **{"trajectories_surplus": 1, "trajectories_truncated": 1},
    }


@pytest.mark.parametrize(("style", "asked"), [("tags", "</answer>"), ("boxed", "\\boxed{}"), ("auto", "\\boxed{}")])
def test_the_rewriter_reads_question_trajectory_and_form(style: Any, asked: str, problem: Make, sample: Make) -> None:
    given = with_style(problem("a", text="compute {trajectory}"), style)
    (request,) = requests([given, problem("b")], {"a": sample("a", reasoning="put {question} here")})
    text = request.messages[0]["content"]
    # What a model wrote is never taken for a placeholder.
    assert "Question:\ncompute {trajectory}\n" in text and "put {question} here" in text and asked in text
    assert (request.id, request.answer, request.metadata) == (given.id, given.answer, given.metadata)


def test_the_rewriter_and_a_reviewer_see_all_messages(tmp_path: Path, problem: Make, sample: Make) -> None:
    turns = [("system", "Answer in French."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "and 1 more?")]
    given = dataclasses.replace(problem("a"), messages=[{"role": role, "content": text} for role, text in turns])
    conversation = "\n\n".join(f"[{role}]\n{text}" for role, text in turns)
    (request,) = requests([given], {"a": sample("a")})
    assert f"Question:\n{conversation}\n\nSolution:\n" in request.messages[0]["content"]
    write_examples(tmp_path / "examples", [example(given, "Three.")])
    assert shown_examples(tmp_path / "examples", 1) == [{"prompt": conversation, "completion": "Three."}]


def test_an_instruction_without_a_placeholder_is_refused(problem: Make, sample: Make) -> None:
    with pytest.raises(InputError, match=r"instruction has no \{trajectory\}"):
        requests([problem("a")], {"a": sample("a")}, "Rewrite {question}")


def test_what_is_rewritten_must_be_right_and_readable_again(tmp_path: Path, problem: Make, sample: Make) -> None:
    problems: list[Problem] = [with_style(problem(name), "boxed") for name in "abcde"]
    chosen: dict[str, Sample] = {name: sample(name, reasoning=f"notes {name}") for name in "abcd"}
    texts = {
        "a": "<think>\nOne and two make three.\n</think>\n\nThe sum is \\boxed{3}.",
        "b": "<think>\nOne and two make four.\n</think>\n\nThe sum is \\boxed{4}.",
        "c": "The sum is \\boxed{3}.",
    }
    samples = {p.id: as_sample(p, texts[p.id]) for p in problems if p.id in texts}
    examples, counts = rewritten(problems, chosen, lambda p: samples.get(p.id), FilterSettings())
    assert counts == {"kept": 1, "rewritten_incorrect": 1, "rewritten_malformed": 1, "rewritten_missing": 1}
    (only,) = examples
    assert (only["problem_id"], only["completion"], only["original"]) == ("a", texts["a"], chosen["a"].completion)
    write_examples(tmp_path / "examples", examples)
    assert pq.read_table(tmp_path / "examples")["original"].to_pylist() == [chosen["a"].completion]
    shown = {"prompt": "compute 1 + 2", "original": chosen["a"].completion, "completion": texts["a"]}
    assert shown_examples(tmp_path / "examples", 5) == [shown]


ENDPOINT = {"kind": "endpoint", "base_url": "http://teacher:8000/v1", "model": "v3"}
SAMPLING = {"temperature": 1.0, "max_new_tokens": 10}


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        ({"engine": ENDPOINT, "model": "x"}, "has its own; leave model out"),
        ({}, "model is missing"),
        ({"engine": {"kind": "local"}}, "model is missing"),
    ],
)
def test_a_teacher_has_one_model(teacher: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Teacher.model_validate({**teacher, "sampling": SAMPLING})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"source": "r1_zero"}, "source 'r1_zero' needs sampling"),
        ({"source": "r1_zero", "sampling": SAMPLING}, "needs a rewriter, or in the miniature world habits"),
        (
            {"source": "sampled", "sampling": SAMPLING, "rewriter": {"engine": ENDPOINT, "sampling": SAMPLING}},
            "a rewriter rewrites R1-Zero's trajectories",
        ),
    ],
)
def test_settings_of_the_cold_start_go_together(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ColdStartData.model_validate({"problems": 5, **fields})
    plain = ColdStartData(source="solutions", problems=5)
    assert "rewriter" not in plain.model_dump()  # keys and records of earlier versions stay
