"""A user's own reward: named in the recipe, found beside the user, and part of what a stage is."""

from __future__ import annotations

import sys

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages.reasoning_rl import STAGE
from grpo.errors import InputError

BRIEF = "def brief(problem, response, *, below=9):\n    return float(response.tokens < below)\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "my_rewards_of_this_test", raising=False)
    path = tmp_path / "my_rewards_of_this_test.py"
    path.write_text(BRIEF)
    yield path
    sys.modules.pop("my_rewards_of_this_test", None)


def recipe(options: str = "{weight=0.5,below=12}"):
    return load_recipe("tiny", ["reasoning_rl.rewards={accuracy=1,'my_rewards_of_this_test:brief'=" + options + "}"])


def test_its_code_is_part_of_the_stage(module):
    config = recipe().reasoning_rl
    before = hashed_config(STAGE, config, seed=0)
    assert config.rewards["my_rewards_of_this_test:brief"].options == {"below": 12}
    assert hashed_config(STAGE, config, seed=0) == before
    module.write_text(BRIEF.replace("<", "<="))
    assert hashed_config(STAGE, config, seed=0) != before


def test_where_it_runs_is_not(module):
    configs = [load_recipe("tiny", [f"reasoning_rl.scoring.workers={n}"]).reasoning_rl for n in (1, 2)]
    assert hashed_config(STAGE, configs[0], seed=0) == hashed_config(STAGE, configs[1], seed=0)


def test_an_option_that_it_does_not_have_is_named(module):
    with pytest.raises(InputError, match=r"reward 'my_rewards_of_this_test:brief': .*its options are below"):
        recipe("{weight=1,under=12}")


def test_a_function_that_it_does_not_have_is_named(module):
    module.write_text("")
    with pytest.raises(InputError, match="has no function 'brief'"):
        recipe()
