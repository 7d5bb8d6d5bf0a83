"""Replay of earlier preferences, on rows that can be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from tasks.preferences.replay import replay
from tasks.preferences.rows import write_preferences


def rows(name: str, train: int, held_out: int = 0) -> list[dict[str, Any]]:
    """Pairs that say something else each; the last `held_out` of them only measure."""
    return [
        {
            "messages": [{"role": "user", "content": "?"}],
            "chosen": f"{name}{i}",
            "rejected": "no",
            "strength": 2.0,
            "source": "judge",
            "held_out": i >= train,
        }
        for i in range(train + held_out)
    ]


@pytest.fixture
def history(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "first.parquet", tmp_path / "second.parquet"]
    write_preferences(paths[0], rows("a", train=10, held_out=5))
    write_preferences(paths[1], rows("b", train=10))
    return paths


def test_a_tenth_of_what_is_trained_on_is_old(history: list[Path]) -> None:
    # 90 new rows and 10 old ones: 10 of 100. The 9 that are held out count for nothing.
    found = replay(rows("c", train=90, held_out=9), history, 0.1, seed=0)
    assert len(found) == len({row["chosen"] for row in found}) == 10
    assert not any(row["held_out"] for row in found)


def test_all_earlier_rounds_are_drawn_from(history: list[Path]) -> None:
    found = replay(rows("c", train=20), history, 0.5, seed=0)  # 20 of the 20 there are
    assert {row["chosen"] for row in found} == {f"{name}{i}" for name in "ab" for i in range(10)}


def test_what_is_said_again_is_no_history(history: list[Path]) -> None:
    found = replay(rows("a", train=10), history, 0.5, seed=0)  # 10 wanted, and the first round's 10 are known
    assert {row["chosen"] for row in found} == {f"b{i}" for i in range(10)}


def test_a_short_history_gives_what_it_has(history: list[Path]) -> None:
    assert len(replay(rows("c", train=1000), history, 0.5, seed=0)) == 20


def test_the_seed_decides_which(history: list[Path]) -> None:
    first, again, other = (replay(rows("c", train=9), history, 0.5, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_no_share_and_no_history_are_no_replay(history: list[Path]) -> None:
    assert replay(rows("c", train=90), history, 0.0, seed=0) == []
    assert replay(rows("c", train=90), [], 0.1, seed=0) == []


def test_a_history_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.parquet: no such file"):
        replay(rows("c", train=9), [tmp_path / "gone.parquet"], 0.1, seed=0)
