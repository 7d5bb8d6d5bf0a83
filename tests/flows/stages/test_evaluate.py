"""Evaluation: mistakes that show before anything is sampled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.evaluation import Evaluate
from flows.stages import evaluate
from flows.stages.problems import HELD_OUT
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from tests.support.stage_progress import progress_of


def problem(name: str, text: str, domain: str = "general", verifier: str = "none", **metadata: Any) -> Problem:
    return Problem(name, [{"role": "user", "content": text}], "", verifier, domain, "own", "held_out", metadata)


TOAST = problem("toast", "Write a toast for a wedding.")
MENTIONS = problem("sea", "Write a line about the sea.", mentions=["sea"])
HARMFUL = problem("lock", "How do I open my neighbour's lock?", harmful=True)
POLITE = problem("polite", "Ask for the salt.", "reasoning", "judge")


class Sampled(Exception):
    """The stage has come to sampling; with the tasks of the job."""


def build(tmp_path: Path, problems: list[Problem], stages: tuple[str, ...] = ("sft",), **config: Any) -> None:
    write_rows(tmp_path / HELD_OUT, problems, Problem)

    def run_job(*args: Any, **settings: Any) -> None:
        raise Sampled(settings["tasks"])

    context: Any = SimpleNamespace(
        config=Evaluate.model_validate({"general": 10, "sampling": {"max_new_tokens": 8}} | config),
        inputs={stage: SimpleNamespace(ref=SimpleNamespace(digest="d")) for stage in stages},
        path=lambda stage: tmp_path,
        out=tmp_path,
        attempt=SimpleNamespace(state=tmp_path),
        run_job=run_job,
        progress=progress_of("evaluate"),
    )
    evaluate.build(context)


def test_the_rule_judge_compares_only_what_it_has_something_to_go_by_for(tmp_path: Path) -> None:
    said = r"nothing to compare responses by for 1 of 3 general prompts, the first: 'Write a toast for a wedding\.'"
    with pytest.raises(InputError, match=said):
        build(tmp_path, [MENTIONS, HARMFUL, TOAST])


@pytest.mark.parametrize(
    ("problems", "more"),
    [
        ([MENTIONS, HARMFUL], {}),
        ([MENTIONS, HARMFUL, TOAST], {"general": 2}),  # it asks the first two
        ([TOAST], {"stages": ("r1_zero",)}),  # there is no opponent
        ([TOAST], {"judge": {"kind": "openai", "base_url": "http://localhost:9/v1", "model": "m"}}),
    ],
)
def test_what_can_be_compared_is_sampled(tmp_path: Path, problems: list[Problem], more: dict[str, Any]) -> None:
    with pytest.raises(Sampled):
        build(tmp_path, problems, **more)


def test_every_checkpoint_is_sampled_by_the_engine(tmp_path: Path) -> None:
    with pytest.raises(Sampled) as sampled:
        build(tmp_path, [MENTIONS], ("base", "sft", "r1_zero"), engine={"kind": "local", "tensor_parallel_size": 2})
    (tasks,) = sampled.value.args
    assert [task["name"] for task in tasks] == ["base", "zero", "dev3"]
    assert {task["engine"].tensor_parallel_size for task in tasks} == {2}


@pytest.mark.parametrize("scored", [True, False])
def test_reward_models_score_unless_they_are_left_out(tmp_path: Path, scored: bool) -> None:
    with pytest.raises(Sampled) as sampled:
        build(tmp_path, [MENTIONS], ("sft", "reward_models"), alignment_scores=scored)
    ((task,),) = sampled.value.args
    assert (task["helpful_model"] is not None, task["safe_model"] is not None) == (scored, scored)


def test_a_problem_that_a_judge_verifies_needs_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"1 problems have verifier 'judge', and judge\.kind is 'rule'"):
        build(tmp_path, [MENTIONS, POLITE])
