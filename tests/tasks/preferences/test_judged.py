"""Pairs and labels, by judges whose verdicts are known."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from tasks.judges.create_judge import make_judge
from tasks.preferences.judged import Judged, labels, pairs
from tasks.preferences.rows import drop_duplicates, held_out, pair_row

DEFAULTS: dict[str, Any] = {
    "judgments": 4,
    "margin": 1.0,
    "length_ratio_max": 3.0,
    "held_out_share": 0.0,
    "seed": 0,
}


class Scripted:
    """Prefers the longer text by a fixed number, whatever the order; adds `bias` to whatever stands first."""

    def __init__(self, size: float | None, bias: float = 0.0):
        self.size, self.bias = size, bias

    def compare_all(self, asked: Any) -> list[float | None]:
        if self.size is None:
            return [None for _ in asked]
        return [(self.size if len(p.a) > len(p.b) else -self.size) + self.bias for p in asked]


def made(judge: Any, sample: Any, problem: Any, texts: list[str], **changes: Any) -> Judged:
    samples = [sample(answer=text, accuracy=None) for text in texts]
    return pairs(samples, {"p": problem(domain="general")}, judge, **{**DEFAULTS, **changes})


def test_the_better_one_is_chosen(sample: Any, problem: Any) -> None:
    rows, counts, _ = made(Scripted(2.0), sample, problem, ["ab", "abc", "ab"])
    assert [(r["chosen"], r["rejected"]) for r in rows] == [("abc", "ab")]
    assert counts == {"candidates": 1, "length": 0, "kept": 1}
    assert (rows[0]["strength"], rows[0]["source"]) == (2.0, "judge")


def test_votes_for_the_first_place_are_measured(sample: Any, problem: Any) -> None:
    # Whatever stands first wins each vote: by 3, against the longer one by 1. 64 votes come in both orders.
    _, _, bias = made(Scripted(1.0, bias=2.0), sample, problem, ["a", "b b"], judgments=64)
    assert (bias["first_wins"], bias["orders_agree"]) == (1.0, 0.0)
    _, _, bias = made(Scripted(2.0, bias=1.0), sample, problem, ["a", "b b"], judgments=64)
    assert bias["orders_agree"] == bias["longer_wins"] == bias["longer_wins_kept"] == bias["length_correlation"] == 1.0


def test_the_margin_is_exclusive(sample: Any, problem: Any) -> None:
    assert made(Scripted(1.0), sample, problem, ["a", "bb"])[1] == {"candidates": 1, "length": 0, "tied": 1, "kept": 0}
    assert made(Scripted(1.1), sample, problem, ["a", "bb"])[1]["kept"] == 1


def test_a_judge_that_only_likes_the_first_decides_nothing(sample: Any, problem: Any) -> None:
    # With 64 random orders the bias of 2 averages out far below the margin.
    assert made(Scripted(0.0, bias=2.0), sample, problem, ["a", "bb"], judgments=64)[1]["kept"] == 0


def test_undecided_and_uneven_pairs_are_dropped(sample: Any, problem: Any) -> None:
    assert made(Scripted(None), sample, problem, ["a", "bb"])[1]["undecided"] == 1
    long = ["one", "one two three four"]
    assert made(Scripted(2.0), sample, problem, long)[1] == {"candidates": 1, "length": 1, "kept": 0}
    assert made(Scripted(2.0), sample, problem, long, length_ratio_max=4.0)[1]["kept"] == 1


def test_labels(sample: Any, problem: Any) -> None:
    known = {"p": problem(domain="general", metadata={"harmful": True, "refusal": "sorry no"})}
    samples = [sample(answer="sorry, no", accuracy=None), sample(answer="at night", accuracy=None)]
    rows, counts = labels(samples, known, make_judge(JudgeSettings()), 0.0)
    assert [row["label"] for row in rows] == [1, 0] and counts == {"safe": 1, "unsafe": 1, "undecided": 0}
    assert rows[0]["response"] == samples[0].completion  # the whole response, reasoning included


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_held_out_is_a_share_of_prompts() -> None:
    share = sum(held_out(said(str(i)), 0.2) for i in range(2000)) / 2000
    assert share == pytest.approx(0.2, abs=0.03)
    assert not held_out(said("x"), 0.0) and held_out(said("x"), 1.0)


def test_a_prompt_is_on_one_side_wherever_it_comes_from() -> None:
    for i in range(50):
        spoken = [{"role": "system", "content": "Be brief."}, *said(f" Say  IT {i}")]
        assert held_out(said(f"say it {i}"), 0.5) == held_out(spoken, 0.5)


def test_the_same_pair_of_two_sources_is_one() -> None:
    rows = [pair_row(said("x"), *pair, 1.0, s, 0.0) for s in ("judge", "file/a") for pair in (("a", "b"), ("b", "a"))]
    assert drop_duplicates(rows) == rows[:2]
