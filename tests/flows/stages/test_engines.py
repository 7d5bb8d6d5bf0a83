"""Engines of the stages that sample: keys of earlier versions, what the job is given, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import cold_start_data, evaluate, reward_models
from grpo.config.engines import VLLM
from grpo.errors import InputError
from grpo.rewards.registry import source_digest

STAGES = {
    "cold_start_data": cold_start_data.STAGE,
    "reward_models": reward_models.STAGE,
    "evaluate": evaluate.stage_for(["sft"]),
}
SAMPLED = ["cold_start_data.source=sampled", "cold_start_data.general=0", "cold_start_data.sampling={max_new_tokens=8}"]
OWN = "tests.support.user_engines:adder"


class Asked(Exception):
    """The task that a sampling job was given."""


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_enters_the_key_and_none_leaves_it_as_it_was(stage: str) -> None:
    def hashed(*overrides: str) -> dict[str, Any]:
        recipe = load_recipe("tiny", [*SAMPLED, *overrides])
        return hashed_config(STAGES[stage], getattr(recipe, stage), 0)

    without, with_vllm = hashed(), hashed(f'{stage}.engine={{kind="local",gpu_memory_utilization=0.8}}')
    assert "engine" not in without
    assert with_vllm.pop("engine") == hashed(f'{stage}.engine={{kind="local"}}')["engine"]
    assert with_vllm == without


def test_addresses_of_a_fleet_are_not_part_of_the_key() -> None:
    def hashed(fields: str) -> dict[str, Any]:
        recipe = load_recipe("tiny", [*SAMPLED, f'cold_start_data.engine={{kind="endpoint",model="m",{fields}}}'])
        config: dict[str, Any] = hashed_config(cold_start_data.STAGE, recipe.cold_start_data, 0)["engine"]
        return config

    fleet = hashed('urls=["http://a:8000/v1","http://b:8000/v1"]')
    assert fleet == {"kind": "endpoint", "base_url": None, "model": "m", "body": {}}
    assert hashed('urls=["http://c:8000/v1"],copy_after=2.0') == hashed('urls_file="/fleet"') == fleet
    # One address stays in the key, as before there were fleets.
    assert hashed('base_url="http://a:8000/v1"') == fleet | {"base_url": "http://a:8000/v1"}


@pytest.mark.parametrize("stage", ["cold_start_data", "reward_models"])
def test_an_own_engine_enters_the_key_by_its_source(stage: str) -> None:
    recipe = load_recipe("tiny", [*SAMPLED, f'{stage}.engine={{kind="function",function="{OWN}"}}'])
    assert hashed_config(STAGES[stage], getattr(recipe, stage), 0)["user_code"] == {OWN: source_digest(OWN)}


def test_the_job_is_given_the_engine(tmp_path: Any) -> None:
    recipe = load_recipe("tiny", [*SAMPLED, *(f'{stage}.engine={{kind="local"}}' for stage in STAGES)])

    def run_job(kind: str, **job: Any) -> None:
        raise Asked(job["tasks"])

    def context(stage: str) -> Any:
        found = SimpleNamespace(path=tmp_path, ref=SimpleNamespace(digest="d"))
        return SimpleNamespace(
            config=getattr(recipe, stage),
            inputs=dict.fromkeys(("base", "sft", "cold_start_sft"), found),
            path=lambda name: tmp_path,
            attempt=SimpleNamespace(state=tmp_path),
            run_job=run_job,
        )

    for run in (
        lambda: cold_start_data._sample(context("cold_start_data"), 3, "base"),
        lambda: reward_models._judge(context("reward_models"), "sft", reward_models.Gathered()),
    ):
        with pytest.raises(Asked) as asked:
            run()
        assert [task["engine"] for task in asked.value.args[0]] == [VLLM(kind="local")]


ASKED, DIVIDED = "{question} {form}", '{kind="local",tensor_parallel_size=2}'


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['cold_start_data.engine={kind="local"}'], "source 'miniature' samples nothing; leave engine out"),
        (['evaluate.engine={kind="endpoint",base_url="http://x/v1",model="m"}'], "evaluate.engine"),
        (
            ['sft_data.engine={kind="endpoint",model="m"}'],
            "base_url: give one of base_url, urls and urls_file",
        ),
        (
            ['sft_data.engine={kind="endpoint",model="m",base_url="http://x/v1",urls=["http://y/v1"]}'],
            "base_url: give one of base_url, urls and urls_file",
        ),
        (
            ['sft_data.engine={kind="endpoint",model="m",urls=["x:8000"]}'],
            "sft_data.engine.urls.0: String should match pattern",
        ),
        (
            ['sft_data.engine={kind="endpoint",model="m",urls_file="fleet"}'],
            "urls_file: fleet is no absolute path; workers have another working directory",
        ),
        (['reward_models.engine={kind="server",tensor_parallel_size=2}'], "tensor_parallel_size is the server's own"),
        (
            ['reasoning_rl.engine={kind="local",tensor_parallel_size=2}', "reasoning_rl.hardware.processes=3"],
            "it does not divide the 3 processes (hardware.processes x hardware.nodes); take a divisor",
        ),
        (
            ['sft_data.engine={kind="local",tensor_parallel_size=2}', "sft_data.ray={gpus=1}"],
            "ray.gpus is 1, but engine.tensor_parallel_size divides vLLM among 2 devices; leave ray.gpus out",
        ),
        (
            ["sft_data.ray={}", "sft_data.hardware.processes=2"],
            "ray places the workers: leave hardware.processes and hardware.nodes at 1",
        ),
        (
            [
                f'sft_data.teacher={{model="m",instruction="{ASKED}",sampling={{max_new_tokens=9}},engine={DIVIDED}}}',
                "sft_data.hardware.nodes=2",
            ],
            "engine.tensor_parallel_size: several processes that sample cannot share one model",
        ),
        # Processes that sample take shards on their own: of two that share a model, one would wait for the other.
        *(
            ([f'{stage}.engine={{kind="local",tensor_parallel_size=2}}', f"{where}.hardware.{many}=2"], said)
            for said in ("engine.tensor_parallel_size: several processes that sample cannot share one model",)
            for stage, where, many in (
                ("sft_data", "sft_data", "processes"),
                ("evaluate", "evaluate", "nodes"),
                ("reward_models", "reward_models.helpful", "processes"),
            )
        ),
    ],
)
def test_bad_input_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", overrides)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_two_engines_may_share_a_gpu_on_ray() -> None:
    recipe = load_recipe("tiny", ['sft_data.engine={kind="local"}', "sft_data.ray={workers=4,gpus=0.5}"])
    assert recipe.sft_data.ray is not None and recipe.sft_data.ray.gpus == 0.5
