"""Statistics of micro-batches add up, and extremes combine."""

from __future__ import annotations

import math

import torch

from grpo.training.totals import Totals


def test_sums_and_extremes() -> None:
    totals = Totals()
    totals.add({"loss": torch.tensor(0.5), "ratio_max": torch.tensor(1.5), "ratio_min": torch.tensor(0.9)})
    totals.add({"loss": torch.tensor(0.25), "ratio_max": torch.tensor(1.25), "ratio_min": torch.tensor(0.5)})
    totals.add({"clipped": torch.tensor(2)})
    assert totals.read() == {"loss": 0.75, "ratio_max": 1.5, "ratio_min": 0.5, "clipped": 2.0}
    assert Totals().read() == {}


def test_sums_keep_what_float32_drops() -> None:
    totals = Totals()
    for value in (1.0, 2**-24, 2**-24):
        totals.add({"loss": torch.tensor(value)})
    assert totals.read()["loss"] == 1 + 2**-23


def test_what_is_not_a_number_stays_so() -> None:
    totals = Totals()
    for value in (1.0, math.nan, 2.0):
        totals.add({"ratio_max": torch.tensor(value), "ratio_min": torch.tensor(value)})
    assert all(math.isnan(value) for value in totals.read().values())
