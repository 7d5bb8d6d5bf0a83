"""Runs beside each other, in numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.data.records import Sample, write_rows
from tasks.evaluation.records import SAMPLES, write_scores
from tasks.report.compare import by_metric, fields, mean_difference, metrics, why
from tasks.store.manifest import InputRef, Manifest


def test_a_difference_that_is_the_same_for_every_problem_has_no_width() -> None:
    found = mean_difference({"a": 0.0, "b": 0.5}, {"b": 0.75, "a": 0.25}, 0.95)
    assert (found.value, found.low, found.high, found.paired) == (0.25, 0.25, 0.25, True)


def test_a_paired_interval_is_of_each_problems_difference() -> None:
    # The differences are 1, 1, 1, 0. A resample of four has mean 0 with chance 1/256, and below 0.5 with 13/256.
    found = mean_difference(dict.fromkeys("abcd", 0.0), {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, 0.95)
    assert (found.value, found.low, found.high) == (0.75, 0.25, 1.0)


def test_other_problems_are_not_paired() -> None:
    # The old mean is 0, 0.5 or 1 with chances 1/4, 1/2, 1/4; the new one is 1 always.
    found = mean_difference({"a": 0.0, "b": 1.0}, {"c": 1.0, "d": 1.0, "e": 1.0}, 0.95)
    assert (found.value, found.low, found.high, found.paired, found.problems) == (0.5, 0.0, 1.0, False, (2, 3))


def test_fields_that_differ_in_any_of_three() -> None:
    configs: list[dict[str, Any]] = [
        {"a": {"b": 1, "c": 2}},
        {"a": {"b": 1, "c": 3}},
        {"a": {"b": 1, "c": 2}, "d": [4]},
    ]
    assert fields(configs) == [
        {"field": "a.c", "values": [2, 3, 2]},
        {"field": "d", "values": [None, None, [4]]},
    ]


def test_a_key_may_have_a_dot() -> None:
    first = {"weights": {"file/a.jsonl": 1.0, "b": 2}}
    second = {"weights": {"file/a.jsonl": 0.5, "b": {"c": 3}}, "weights.b": 4}
    assert fields([first, second]) == [
        {"field": "weights.b", "values": [2, {"c": 3}]},
        {"field": "weights.b", "values": [None, 4]},
        {"field": "weights.file/a.jsonl", "values": [1.0, 0.5]},
    ]


def test_values_by_problem(sample: Any) -> None:
    found = by_metric(
        [
            sample("p", "3", 1.0, tokens=10),
            sample("p", "4", 0.0, tokens=20),
            sample("q", "5", 0.0),
            sample("g", accuracy=None, rewards={"helpful": 2.0, "safe": 0.5, "format": 1.0, "language": 1.0}),
        ],
        {"cons@k": {"p": 1.0, "q": 0.0}},
    )
    assert found["pass@1"] == {"p": 0.5, "q": 0.0}
    assert found["cons@k"] == {"p": 1.0, "q": 0.0}
    assert found["mean_tokens"] == {"p": 15.0, "q": 10.0}
    assert found["alignment"] == {"g": 2.5}


def test_tables_beside_each_other(sample: Any, tmp_path: Path) -> None:
    for name, accuracy in (("old", 0.0), ("new", 1.0)):
        folder = tmp_path / name / SAMPLES / "dev1"
        folder.mkdir(parents=True)
        write_rows(folder / "0.parquet", [sample("p", accuracy=accuracy)], Sample)
    write_scores(tmp_path / "new", {"dev1": {"cons@k": {"p": 1.0}}})  # the old one is of a version that kept none
    tables = [
        {"dev1": {"pass@1": 0.0, "cons@k": 0.0, "refusal": 0.25}},
        {"dev1": {"pass@1": 1.0, "cons@k": 1.0, "refusal": 0.5}},
    ]
    accuracy_row, vote, refusal = metrics(tables, [tmp_path / "old", tmp_path / "new"], 0.95)
    assert vote["differences"][0]["value"] == 1.0 and vote["differences"][0]["low"] is None
    assert accuracy_row["differences"] == [{"value": 1.0, "low": 1.0, "high": 1.0, "paired": True, "problems": (1, 1)}]
    assert refusal["differences"][0]["value"] == 0.25 and refusal["differences"][0]["low"] is None


def test_pass_at_k_is_compared_at_one_k(sample: Any, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name / SAMPLES / "r1").mkdir(parents=True)
        write_rows(tmp_path / name / SAMPLES / "r1" / "0.parquet", [sample("p")], Sample)
    row: dict[str, Any] = {"pass@1": 0.5, "pass@k": 0.75, "cons@k": 0.5, "gsm8k/pass@k": 0.5, "gsm8k/k": 2}
    old = {**row, "problems": 4, "samples": 16}  # of an earlier version: k was 4, all samples
    tables = [{"r1": old}, {"r1": {**row, "k": 2}}, {"r1": {**row, "k": 4, "gsm8k/k": 8}}]
    found = {row["metric"]: row for row in metrics(tables, [tmp_path / name for name in "abc"], 0.95)}
    compared = {name: [of is not None for of in row["differences"]] for name, row in found.items()}
    assert compared == {
        **{"pass@1": [True, True], "pass@k": [False, True], "cons@k": [False, True], "gsm8k/pass@k": [True, False]}
    }
    assert (found["cons@k"]["k"], found["gsm8k/pass@k"]["k"]) == ([4, 2, 4], [2, 2, 8])
    assert "k" not in found["pass@1"]


def made(key: str, config: dict[str, Any], digest: str, version: int = 1) -> Manifest:
    return Manifest("sft", version, key, "d" + key, 1, "", 1.0, config, {"base": InputRef(digest)}, {})


def test_why_two_artifacts_differ() -> None:
    old, new = made("a", {"epochs": 2}, "x"), made("b", {"epochs": 3}, "y", version=2)
    assert why(old, new) == ["epochs: 2 -> 3", "other base", "stage version 1 -> 2"]
