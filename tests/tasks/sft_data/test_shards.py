"""Cutting problems into shards: what a further source, another policy or a limit change, and what they leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.data.records import Problem, read_problems, write_rows
from grpo.errors import InputError
from tasks.sft_data.shards import ProblemShard, cut

MADE_BY = {"policy": "a", "samples_per_problem": 4}
ALL = {"reasoning": 1000, "general": 1000}


def problems(source: str, count: int, domain: str = "reasoning") -> list[Problem]:
    return [
        Problem(f"{source}-{i}", [{"role": "user", "content": f"{source} {i}"}], "1", "exact", domain, "en", source)
        for i in range(count)
    ]


def shards(tmp_path: Path, rows: list[Problem], size: int = 10, made_by=MADE_BY, seed=0, limits=ALL):
    path = tmp_path / "problems.parquet"
    write_rows(path, rows, Problem)
    return cut(path, limits, size, made_by, seed, tmp_path / "shards")


def keys(found: list[ProblemShard]) -> set[str]:
    return {shard.key for shard in found}


def test_each_problem_is_in_one_shard_of_its_source(tmp_path):
    rows = problems("a", 25) + problems("b", 7, "general")
    found = shards(tmp_path, rows)
    assert [(shard.source, shard.rows) for shard in found] == [("a", 10), ("a", 10), ("a", 5), ("b", 7)]
    held = [problem.id for shard in found for problem in read_problems(shard.problems)]
    assert sorted(held) == sorted(problem.id for problem in rows)
    for shard in found:
        assert {problem.source for problem in read_problems(shard.problems)} == {shard.source}


def test_a_further_source_leaves_the_shards_of_the_others(tmp_path):
    before = keys(shards(tmp_path, problems("b", 25)))
    after = shards(tmp_path, problems("a", 12) + problems("b", 25) + problems("c", 5))
    assert before < keys(after)
    assert keys(after) - before == {shard.key for shard in after if shard.source != "b"}


def test_where_problems_stand_changes_nothing(tmp_path):
    rows = problems("a", 25)
    assert keys(shards(tmp_path, rows)) == keys(shards(tmp_path, rows[::-1]))


@pytest.mark.parametrize("change", [{"made_by": {**MADE_BY, "policy": "b"}}, {"seed": 1}, {"size": 9}])
def test_what_samples_depend_on_changes_all(tmp_path, change):
    rows = problems("a", 25)
    assert not keys(shards(tmp_path, rows)) & keys(shards(tmp_path, rows, **change))


def test_a_limit_is_a_fair_draw_from_all_sources(tmp_path):
    rows = problems("a", 500) + problems("b", 500)
    found = shards(tmp_path, rows, size=1000, limits={"reasoning": 400})
    assert sum(shard.rows for shard in found) == 400
    # 200 of each are expected; 7.7 is the standard deviation of a draw without replacement.
    assert all(170 <= shard.rows <= 230 for shard in found)


def test_no_problems_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no problems of general to sample"):
        shards(tmp_path, problems("a", 3), limits={"general": 5})
