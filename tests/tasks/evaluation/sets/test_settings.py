"""Settings of test sets, and what is wrong with some."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flows.recipe.load import load_recipe
from grpo.errors import InputError
from tasks.evaluation.sets.settings import EvaluationSet, SetData

SETS = "evaluate.sets"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ('[{name="gsm8"}]', "unknown test set 'gsm8'; did you mean 'gsm8k'? known are gsm8k, math500, aime2024"),
        ('[{name="ours"}]', "unknown test set 'ours'; known are"),
        ('[{name="gsm8k"}, {name="gsm8k"}]', "two test sets are called 'gsm8k'; give each a name of its own"),
        ('[{name="gsm8k", k=8}]', "set 'gsm8k': k is 8, above its 4 samples a problem; lower k or raise samples_per"),
        ('[{name="gsm8k", samples_per_problem=2, k=3}]', "k is 3, above its 2 samples a problem"),
        ('[{name="livecodebench"}]', "livecodebench has no data set on the hub; give path, a file of its rows"),
        ('[{name="a.b", like="gsm8k"}]', "evaluate.sets.0.name: String should match pattern"),
        ('[{name="gsm8k", prompt_style="ask"}]', "give question, instruction, or a text with {question} in it"),
        (
            '[{name="x", path="a.jsonl", source={kind="reasoning_gym", family="chain_sum", count=3}}]',
            "leave path and like",
        ),
    ],
)
def test_a_mistake_is_one_line(sets: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe("tiny", [f"{SETS}={sets}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_k_above_the_samples_of_held_out_problems() -> None:
    with pytest.raises(InputError, match="k is 5, above samples_per_problem"):
        load_recipe("tiny", ["evaluate.k=5"])


def test_without_sets_nothing_enters_a_key() -> None:
    recipe = load_recipe("tiny")
    assert not {"sets", "k"} & recipe.evaluate.model_dump().keys()
    assert "test_sets" not in recipe.problems.model_dump()


def test_the_problems_are_told_what_a_set_is_and_not_how_it_is_asked() -> None:
    from flows.stage_graphs import problems_with_test_sets

    def problems(*settings: str) -> dict[str, Any]:
        sets = f'{SETS}=[{{name="gsm8k", path="x.jsonl"{"".join(f", {s}" for s in settings)}}}]'
        return problems_with_test_sets(load_recipe("tiny", [sets])).model_dump()

    assert problems("samples_per_problem=8", "k=2", "problems=5") == problems()
    assert problems()["test_sets"] == [{"name": "gsm8k", "like": None, "path": "x.jsonl", "source": None}]


def test_every_known_set_is_complete() -> None:
    for name in ("gsm8k", "math500", "aime2024", "aime2025", "aime2026", "gpqa_diamond", "ifeval"):
        assert SetData(name=name).known is not None
    with pytest.raises(ValidationError, match="give path"):
        SetData(name="livecodebench")


def test_the_size_of_a_set_for_the_estimate() -> None:
    made: Any = {"kind": "reasoning_gym", "family": "chain_sum", "count": 30}
    assert EvaluationSet(name="math500").size == 500 and EvaluationSet(name="gsm8k", problems=20).size == 20
    assert EvaluationSet(name="sums", source=made).size == 30
