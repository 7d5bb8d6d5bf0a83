"""Written demonstrations: what they are compared with, how long they may be, and which filters they do not know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.data_sections import ColdStartData
from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import cold_start_data, problems
from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from tasks.sft_data.filters import DemonstrationFilters, FilterSettings

QUOTED = "one two three four five six seven eight nine ten"


def problem(name: str, text: str, solution: str = "") -> Problem:
    asked = [{"role": "user", "content": text}]
    return Problem(name, asked, "7", "number", "reasoning", "en", "own", {"solution": solution})


def build(folder: Path, **filters: Any) -> dict[str, int]:
    """Counts of the stage for three worked solutions, of which one quotes a test set and one has hundreds of words."""
    of_problems = folder / "problems"
    (of_problems / problems.TEST_SETS).mkdir(parents=True)
    solutions = ["three and four are seven", f"so {QUOTED}", " ".join(f"word{n}" for n in range(200))]
    asked = [problem(str(n), f"What is {n} + 7?", solution) for n, solution in enumerate(solutions)]
    write_rows(of_problems / problems.TRAIN, asked, Problem)
    write_rows(of_problems / problems.HELD_OUT, [], Problem)
    write_rows(problems.test_set_file(of_problems, "own"), [problem("t", f"Say {QUOTED}.")], Problem)
    values = {"source": "solutions", "problems": 9, "filters": {"language_min": 0, **filters}}
    paths = {"problems": of_problems, "base": folder / "base"}
    context: Any = SimpleNamespace(
        config=ColdStartData.model_validate(values), path=paths.__getitem__, seed=0, out=folder / "out"
    )
    return cold_start_data.build(context).counts


def test_a_demonstration_that_quotes_a_test_set_is_dropped(tmp_path: Path) -> None:
    assert build(tmp_path) == {"kept": 2, "contaminated": 1}  # without context no tokenizer is needed


def test_written_demonstrations_fit_into_the_context(tmp_path: Path) -> None:
    from grpo.training.pretrain import train_tokenizer

    settings = Pretrain(vocabulary=320, steps=1, optimizer=Optimizer(learning_rate=1e-3))
    train_tokenizer(["three and four are seven"] * 50, settings).save_pretrained(tmp_path / "base")
    # 200 words are at least 200 tokens, the others have fewer than 150 characters with tags and prompt
    assert build(tmp_path, context=200) == {"kept": 1, "too_long": 1, "contaminated": 1}


@pytest.mark.parametrize(
    "filters",
    [
        "contamination='prompts'",
        "pass_rate_min=0.1",
        "pass_rate_max=0.9",
        "pass_rate_samples=8",
        "near_duplicate_jaccard=0.5",
        "shingle_words=3",
    ],
)
def test_a_filter_without_effect_is_refused_by_name_and_not_offered(filters: str) -> None:
    name = filters.partition("=")[0]
    with pytest.raises(InputError, match=rf"cold_start_data\.filters.*{name} has no effect on cold-start demo"):
        load_recipe("tiny", [f"cold_start_data.filters={{{filters}}}"])
    load_recipe("tiny", [f"sft_data.filters={{{filters}}}"])
    assert name not in DemonstrationFilters.model_json_schema()["properties"]
    assert name in FilterSettings.model_json_schema()["properties"]


def test_a_default_that_a_recipe_names_is_not_sent_to_a_form_without_it() -> None:
    overrides = ["cold_start_data.filters={near_duplicate_jaccard=0.8, language_min=0.5}"]
    filters = load_recipe("tiny", overrides).cold_start_data.filters
    assert filters.model_dump(exclude_unset=True) == {"language_min": 0.5}


@pytest.mark.parametrize("recipe", ["tiny", "real"])
def test_keys_have_all_filters_as_before(recipe: str) -> None:
    config = load_recipe(recipe).cold_start_data
    hashed = hashed_config(cold_start_data.STAGE, config, 0)["filters"]
    assert hashed == FilterSettings(language_min=config.filters.language_min, leaks=recipe != "real").model_dump()
    assert ColdStartData.model_validate(config.model_dump()) == config
