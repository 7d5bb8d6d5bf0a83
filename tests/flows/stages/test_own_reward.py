"""A user's own reward: named in the recipe, found beside the user, and part of what a stage is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import Context, RunContext, hashed_config
from flows.stages import sft_data
from flows.stages.problems import TRAIN
from flows.stages.reasoning_rl import STAGE
from grpo.data.records import Problem, write_rows
from grpo.errors import InputError
from tests.support.stage_progress import progress_of

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


OWN = "my_rewards_of_this_test:brief"
ENGINE = f'engine={{kind="function",function="{OWN}"}}'


def shard_keys(folder: Path, *settings: str) -> list[str]:
    """Keys of sft_data's shards: of one reasoning problem, and of one general."""
    asked: list[Any] = [{"role": "user", "content": "?"}]
    (folder / "problems").mkdir(exist_ok=True)
    problems = [
        Problem("r", asked, "1", "number", "reasoning", "en", "a"),
        Problem("g", asked, "", "none", "general", "en", "b"),
    ]
    write_rows(folder / "problems" / TRAIN, problems, Problem)
    found: Any = SimpleNamespace(path=folder / "problems", ref=SimpleNamespace(digest="d"))
    attempt: Any = SimpleNamespace(state=folder)
    unused: Any = None
    config = load_recipe("tiny", [f"sft_data.{setting}" for setting in settings]).sft_data
    inputs = dict.fromkeys(("problems", sft_data.POLICY), found)
    context = Context(sft_data.STAGE, config, 0, inputs, attempt, RunContext(), unused, "", progress_of("sft_data"))
    return [shard.key for shard in sft_data._cut(context, None)]


def test_shards_of_samples_without_own_code_keep_their_keys(tmp_path):
    """Literals of the version before own code entered the keys."""
    teacher = 'teacher={engine={kind="endpoint",base_url="http://a/v1",model="m"},sampling={max_new_tokens=8}}'
    reasoning = "668c9d99e8d83ddeffc7221bc4a14aaf49650cbfff8f3c5d35c0ba315921d30d"
    general = "27756488bcb156f5e462d46721ed2e328add5a8fd16acf582ff17f49bcb4ef22"
    taught = "f373c82fbccb630e3a2208206f134e7ab597781468325188593268ad97989214"
    assert shard_keys(tmp_path) == [reasoning, general]
    assert shard_keys(tmp_path, teacher) == [reasoning, taught]


@pytest.mark.parametrize(
    ("settings", "made_anew"),
    [
        ([f"rewards=['accuracy','format','language','{OWN}']"], [True, True]),
        ([ENGINE], [True, True]),
        ([f"teacher={{{ENGINE},sampling={{max_new_tokens=8}}}}"], [False, True]),  # a teacher answers general prompts
    ],
)
def test_own_code_is_part_of_the_shards_it_samples_or_scores(module, tmp_path, settings, made_anew):
    before = shard_keys(tmp_path, *settings)
    assert shard_keys(tmp_path, *settings) == before
    module.write_text(BRIEF.replace("<", "<="))
    after = shard_keys(tmp_path, *settings)
    assert [one != other for one, other in zip(before, after, strict=True)] == made_anew
