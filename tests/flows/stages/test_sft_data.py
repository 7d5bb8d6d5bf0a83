"""The stage sft_data by the command: what a further source samples again, and that a forced run gives the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stages.problems import HELD_OUT, TRAIN
from flows.stages.sft_data import SAMPLES, _how_sampled
from grpo.data.records import Problem, write_rows
from tasks.store.manifest import artifact_key
from tasks.store.store import Store

SETTINGS = [
    'sft_data.engine={kind="function",function="tests.support.user_engines:adder"}',
    "sft_data.problems=1000",
    "sft_data.general=0",
    "sft_data.shard_problems=20",
    "sft_data.judged=[]",
    "sft_data.filters={language_min=0}",
]


def sums(source: str, count: int, first: int = 0) -> list[Problem]:
    return [
        Problem(
            f"{source}{i}",
            [{"role": "user", "content": f"For {source}: what is {i} + 1?"}],
            *(str(i + 1), "number", "reasoning", "en", source),
        )
        for i in range(first, first + count)
    ]


def publish(home: Path, name: str, *sources: str) -> str:
    """An artifact of stage `name`: problems of the sources, or, without, a policy that nobody reads."""
    with Store(home).attempt(name, artifact_key(name, 1, {"of": sources}, {})) as attempt:
        if sources:
            write_rows(attempt.out / TRAIN, [p for source in sources for p in sums(source, 50)], Problem)
            write_rows(attempt.out / HELD_OUT, sums("held out", 10, 1000), Problem)
        else:
            (attempt.out / "no-weights").touch()
        return attempt.publish(stage_version=1, config={"of": sources}).key


def shards(home: Path) -> dict[str, int]:
    """Sampled shards, and when each was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in (home / SAMPLES).glob("*/*.parquet")}


def test_samples_are_shared_only_under_the_limits_by_which_their_rewards_may_have_failed() -> None:
    by_default = _how_sampled(load_recipe("tiny").sft_data, None)
    patient = load_recipe("tiny", ["sft_data.scoring.time_limit_s=60", "sft_data.scoring.workers=3"]).sft_data
    assert "scoring" not in by_default
    assert _how_sampled(patient, None) == by_default | {"scoring": {"time_limit_s": 60.0}}


@pytest.mark.slow
def test_a_further_source_samples_only_itself_and_a_forced_run_gives_the_same(tmp_path: Path, r1: Any) -> None:
    command = type(r1)(tmp_path)
    policy = publish(tmp_path, "reasoning_rl")

    def run(problems: str, *more: str) -> dict[str, Any]:
        sets = [part for value in SETTINGS for part in ("--set", value)]
        inputs = ["--input", f"problems={problems}", "--input", f"reasoning_rl={policy}"]
        done = command("run", "tiny", "--only", "sft_data", *sets, *inputs, *more, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        (stage,) = json.loads(done.stdout.splitlines()[-1])["stages"]
        manifest = Store(tmp_path).resolve(stage["key"])
        return {"status": stage["status"], "digest": manifest.digest, "counts": manifest.counts}

    two = run(publish(tmp_path, "problems", "a", "b"))
    before = shards(tmp_path)
    assert len(before) == 6  # 50 problems of each source, 20 a shard
    three_problems = publish(tmp_path, "problems", "a", "b", "c")
    three = run(three_problems)
    after = shards(tmp_path)
    assert len(after) == 9 and before.items() < after.items()
    assert three["counts"]["reasoning_sampled"] == 3 / 2 * two["counts"]["reasoning_sampled"]
    again = run(three_problems, "--force", "sft_data")
    assert again == three
    assert shards(tmp_path) == after  # a forced run samples for itself
