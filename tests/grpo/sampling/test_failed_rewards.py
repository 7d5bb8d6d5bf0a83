"""Groups of which a reward failed: a rerun scores them again, without sampling again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from grpo.config.common import Sampling
from grpo.config.jobs import SampleTask
from grpo.config.scoring import Scoring
from grpo.data.completions import TextCompletions
from grpo.data.records import Problem, Sample, read_samples
from grpo.errors import TrainingStopped
from grpo.sampling.journal import Journal
from grpo.sampling.shard import Shard
from grpo.scoring.scorer import Scorer
from tests.support.job_runner import user
from tests.support.user_engines import Adder

SLOW = "tests.support.user_rewards:takes_half_a_second"
PROBLEMS = [
    Problem(f"sums{i}", user(f"What is {i} + 1?"), str(i + 1), "number", "reasoning", "en", "sums") for i in range(2)
]


class Counting(Adder):
    """Always right; counts the problems it is asked."""

    asked = 0

    def write(
        self, problems: Sequence[Problem], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, TextCompletions]]:
        self.asked += len(problems)
        return super().write(problems, count, sampling, seeds)


def make(folder: Path, engine: Counting, rewards: list[str], time_limit_s: float, **fields: int) -> list[Sample]:
    path = folder / "shard-00000.parquet"
    sampling = Sampling(max_new_tokens=30, temperature=1.0)
    fields = {"samples_per_problem": 1, **fields}
    task = SampleTask(name="t", model="", policy="p", problems=[], sampling=sampling, rewards=rewards, **fields)
    scorer = Scorer({name: {} for name in rewards}, Scoring(workers=2, time_limit_s=time_limit_s))
    journal = Journal(path.with_suffix(".journal"))
    try:
        Shard(task, PROBLEMS, 0, lambda group: None).make(path, journal, engine, scorer, 0.5)
    finally:
        journal.close()
        scorer.close()
    return read_samples(path)


def test_a_rerun_with_more_time_scores_timeouts_again(tmp_path: Path) -> None:
    engine = Counting()
    with pytest.raises(TrainingStopped, match="failed for 2 of 2 completions .2 timeout.* if the stage has settings"):
        make(tmp_path, engine, [SLOW], 0.1)
    assert [sample.rewards for sample in make(tmp_path, engine, [SLOW], 10)] == [{SLOW: 1.0}] * 2
    assert engine.asked == 2


def test_a_problem_that_is_right_when_scored_again_needs_no_second_round(tmp_path: Path) -> None:
    """The first scoring failed and counted as wrong, so there is a second round in the journal."""
    journal = Journal(tmp_path / "shard-00000.journal")
    for number in (0, 1):
        group = {"problem": "sums0", "round": number, "completions": [["<think>1</think><answer>1</answer>", 20, True]]}
        failures = {"broken": 1, "example": "timed out", "kinds": {"timeout": 1}}
        journal.append(group)
        journal.append({"problem": "sums0", "round": number, "rewards": [{"accuracy": 0.0}], "failures": failures})
    journal.close()
    engine = Counting()
    samples = make(tmp_path, engine, ["accuracy"], 10, enough_right=1, samples_max=2)
    assert [(s.problem_id, s.number, s.rewards["accuracy"]) for s in samples] == [("sums0", 0, 1.0), ("sums1", 0, 1.0)]
    assert engine.asked == 1  # sums1
