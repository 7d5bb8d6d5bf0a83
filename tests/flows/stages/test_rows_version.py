"""How rows are read and checked is part of the key of what is made from rows, and of nothing else."""

from __future__ import annotations

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import problems, sft_data
from tasks.problems.rows import ROWS_VERSION


def test_problems_from_a_file_depend_on_it_and_generated_ones_do_not() -> None:
    generated, read = load_recipe("tiny"), load_recipe("smollm2-135m")
    assert "rows" not in hashed_config(problems.STAGE, generated.problems, 0)
    assert hashed_config(problems.STAGE, read.problems, 0)["rows"] == ROWS_VERSION


def test_a_mix_with_data_of_others_depends_on_it() -> None:
    paper = load_recipe("r1-paper").sft_data
    assert "rows" not in hashed_config(sft_data.STAGE, load_recipe("tiny").sft_data, 0)
    assert paper.mix.sources and hashed_config(sft_data.STAGE, paper, 0)["rows"] == ROWS_VERSION
