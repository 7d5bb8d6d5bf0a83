"""Statistics of a data set: histograms and the tables that are sums of its lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tasks.sft_data.statistics import bins, by, funnel, histograms


def line(part: str, outcome: str, samples: int, tokens: int = 0) -> dict[str, Any]:
    return {"part": part, "outcome": outcome, "samples": samples, "tokens": tokens}


def test_a_length_at_an_edge_is_in_the_bin_above_it() -> None:
    made = histograms({"a": np.array([0, 9, 10, 99, 100]), "b": np.array([55])})
    assert made["edges"] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
    assert made["parts"]["a"]["counts"] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert made["parts"]["b"] == {
        **{"counts": [0] * 5 + [1] + [0] * 5, "total": 55, "mean": 55.0, "median": 55, "p95": 55, "max": 55}
    }
    assert [b for b in bins(made) if b[0] in (0, 10, 50, 100)] == [
        *((0, 10, [2, 0]), (10, 20, [1, 0]), (50, 60, [0, 1]), (100, 110, [1, 0]))
    ]


def test_quantiles_are_lengths_that_occur() -> None:
    made = histograms({"a": np.arange(1, 101)})["parts"]["a"]
    assert (made["mean"], made["median"], made["p95"], made["max"], made["total"]) == (50.5, 50, 95, 100, 5050)


@pytest.mark.parametrize(
    ("longest", "width"), [(0, 1), (19, 1), (20, 2), (39, 2), (40, 5), (99, 5), (100, 10), (199, 10), (32_768, 2000)]
)
def test_bins_are_as_narrow_as_twenty_of_them_allow(longest: int, width: int) -> None:
    edges = histograms({"a": np.array([longest])})["edges"]
    assert edges[1] == width and edges[-2] <= longest < edges[-1] and len(edges) <= 21


def test_empty_bins_at_the_ends_are_not_shown_and_nothing_has_none() -> None:
    assert bins(histograms({"a": np.array([17, 19])})) == [(17, 18, [1]), (18, 19, [0]), (19, 20, [1])]
    assert bins(histograms({})) == []


LINES = [line("a", "kept", 5, 50), line("a", "incorrect", 2), line("b", "surplus", 4), line("b", "kept", 1, 7)]


def test_the_funnel_adds_up_in_every_column() -> None:
    head, rows = funnel(LINES, "part")
    assert head == ["", "all", "a", "b"]
    assert rows == [["sampled", 12, 7, 5], ["surplus", 4, 0, 4], ["incorrect", 2, 2, 0], ["kept", 6, 5, 1]]


def test_sums_by_any_columns() -> None:
    assert by(LINES, "outcome") == {("incorrect",): 2, ("kept",): 6, ("surplus",): 4}
    assert by(LINES, "part", "outcome", what="tokens")["b", "kept"] == 7
