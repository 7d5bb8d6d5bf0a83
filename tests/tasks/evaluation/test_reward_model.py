"""Held-out measures of reward models, on scores that can be worked through by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tasks.evaluation.reward_model import agreement, calibration, combine, quality
from tasks.evaluation.reward_model_plots import plot


def pair(chosen: float, rejected: float, prompt: str = "Hi", strength: float = 2.0, source: str = "judge") -> Any:
    row = {"messages": [{"role": "user", "content": prompt}], "chosen": "yes", "rejected": "no", "held_out": True}
    return {**row, "strength": strength, "source": source, "chosen_score": chosen, "rejected_score": rejected}


def point(score: float, label: int, prompt: str = "Hi") -> Any:
    row = {"messages": [{"role": "user", "content": prompt}], "response": "yes", "held_out": True, "source": "judge"}
    return {**row, "label": label, "score": score}


L78 = math.log(78 / 22)  # sigma of it is 0.78


def test_pairs_by_hand() -> None:
    found = quality([pair(L78, 0.0), pair(0.0, -L78), pair(L78 + 1, 1.0), pair(-1.0, L78 - 1)])
    # Four predictions of 0.78, three of them right.
    assert found.metrics["held_out_accuracy"] == 0.75
    assert found.metrics["held_out_calibration_error"] == pytest.approx(0.03)
    (filled,) = found.calibration
    assert (filled["predicted"], filled["right"], filled["count"]) == (pytest.approx(0.78), 0.75, 4)
    assert (filled["from"], filled["to"]) == (pytest.approx(0.75), pytest.approx(0.8))
    assert found.metrics["held_out_chosen_mean"] == pytest.approx((L78 + 0 + L78 + 1 - 1) / 4)
    assert found.scores["rejected"] == [0.0, -L78, 1.0, L78 - 1]


def test_a_sure_model_that_is_always_wrong_is_off_by_all_of_it() -> None:
    found = quality([pair(-50.0, 50.0), pair(-1000.0, 1000.0)])
    assert (found.metrics["held_out_accuracy"], found.metrics["held_out_calibration_error"]) == (0.0, pytest.approx(1))


def test_labels_by_hand() -> None:
    found = quality([point(L78, 1), point(L78, 1), point(L78, 1), point(L78, 0), point(-L78, 0)])
    # 0.78 was predicted and came true in three of four; 0.22 in none of one.
    assert found.metrics["held_out_accuracy"] == 0.8
    assert found.metrics["held_out_calibration_error"] == pytest.approx((4 * 0.03 + 0.22) / 5)
    assert [(row["predicted"], row["right"]) for row in found.calibration] == [
        (pytest.approx(0.22), 0.0),
        (pytest.approx(0.78), 0.75),
    ]
    assert (found.metrics["held_out_safe_right"], found.metrics["held_out_unsafe_right"]) == (1.0, 0.5)
    assert found.agreement == [] and found.metrics["held_out_unsafe_mean"] == pytest.approx(0.0)


def test_the_interval_is_over_prompts() -> None:
    # A hundred right pairs of one prompt and a wrong one of another: the prompts are drawn, so both extremes occur.
    found = quality([pair(1.0, 0.0, "many")] * 100 + [pair(0.0, 1.0, "one")])
    assert (found.metrics["held_out_accuracy_low"], found.metrics["held_out_accuracy_high"]) == (0.0, 1.0)
    # 64 prompts, half of them right: 0.5 plus and minus 1.96 sqrt(0.25 / 64) = 0.12.
    found = quality([pair(float(i % 2), 0.5, str(i)) for i in range(64)])
    assert found.metrics["held_out_accuracy_low"] == pytest.approx(0.5 - 0.1225, abs=0.02)
    assert found.metrics["held_out_accuracy_high"] == pytest.approx(0.5 + 0.1225, abs=0.02)


def test_the_last_bin_holds_certainty() -> None:
    assert [row["to"] for row in calibration([1.0, 0.0], [True, False], 0.0)] == pytest.approx([0.1, 1.0])


def test_agreement_is_with_the_judge_alone_by_strength() -> None:
    rows = [pair(1, 0, strength=1.25), pair(0, 1, strength=1.25), pair(1, 0, strength=2.0)]
    rows += [pair(0, 1, strength=2.0, source="file/given.jsonl")]
    assert agreement(rows) == [
        {"strength": 1.25, "agree": 0.5, "count": 2},
        {"strength": 2.0, "agree": 1.0, "count": 1},
    ]


def test_an_ensemble_by_hand() -> None:
    first, second = [pair(3.0, 0.0), pair(1.0, 2.0)], [pair(1.0, 0.0), pair(1.0, 4.0)]
    rows = combine([first, second])
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(2.0, 0.0), (1.0, 3.0)]
    assert [row["uncertainty"] for row in rows] == [1.0, 1.0]  # differences of 3 and 1, and of -1 and -3
    metrics = quality(combine([[*first, pair(1.0, 0.0)], [*second, pair(1.0, 0.0)]])).metrics
    # Right are the first, of uncertainty 1, and the last, of which both are sure; wrong is the second.
    assert metrics["held_out_uncertainty_right"] == 0.5 and metrics["held_out_uncertainty_wrong"] == 1.0
    assert [row["uncertainty"] for row in combine([[point(1.0, 1)], [point(-3.0, 1)]])] == [2.0]


def test_pictures_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    pairs = quality([pair(L78, 0.0), pair(0.0, 1.0, strength=1.5)])
    points = quality([point(1.0, 1)])  # no unsafe one: its histogram is empty
    names = [path.name for path in plot(pairs, tmp_path / "a", "helpful") + plot(points, tmp_path / "a", "safe")]
    assert names == [
        *("helpful_calibration.png", "helpful_scores.png", "helpful_agreement.png"),
        *("safe_calibration.png", "safe_scores.png"),
    ]
    plot(pairs, tmp_path / "b", "helpful")
    for path in (tmp_path / "b").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
        assert path.read_bytes().startswith(b"\x89PNG")
