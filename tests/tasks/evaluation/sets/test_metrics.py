"""Rows of test sets, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from grpo.errors import InputError
from tasks.evaluation.records import by_set, in_set, numbers
from tasks.evaluation.sets.metrics import set_metrics, set_scores
from tasks.report.tables import markdown, set_sections

WORDS, NO_CAT = {"kind": "words", "min": 3}, {"kind": "excludes", "words": ["cat"]}


def test_a_row_has_shares_with_intervals(sample: Any, problem: Any) -> None:
    rows = [sample("a", answer, right) for answer, right in [("3", 1.0), ("4", 0.0), ("5", 0.0), ("6", 0.0)]]
    problems = {"a": problem("a")}
    scores = set_scores(rows, problems, 2)
    assert scores == {"pass@1": {"a": 0.25}, "pass@k": {"a": 0.5}, "cons@k": {"a": 0.5}}  # 3 wins a tie, 5 does not
    row = set_metrics(rows, problems, scores, 0.95, 2)
    assert (row["pass@1"], row["pass@1_ci95"], row["problems"], row["samples"], row["k"]) == (
        0.25,
        [0.25, 0.25],
        1,
        4,
        2,
    )


def test_all_constraints_of_a_prompt_make_it_right(sample: Any, problem: Any) -> None:
    asks = {"verifier": "none", "domain": "general", "answer": "", "metadata": {"constraints": [WORDS, NO_CAT]}}
    rows = [
        sample("g", accuracy=None, rewards={}, summary="a dog barks"),
        sample("g", accuracy=None, rewards={}, summary="the cat sleeps"),  # one of two
    ]
    problems = {"g": problem("g", **asks)}
    scores = set_scores(rows, problems, None)
    assert scores == {"pass@1": {"g": 0.5}, "pass@k": {"g": 1.0}}  # free text has no majority
    assert set_metrics(rows, problems, scores, 0.95, None)["instructions"] == 0.75


def test_programs_have_no_majority(sample: Any, problem: Any) -> None:
    problems = {"a": problem("a", verifier="code", metadata={"tests": [{"assert": "assert True"}]})}
    assert set_scores([sample("a", "x = 1", 1.0)], problems, None).keys() == {"pass@1", "pass@k"}


def test_a_prompt_that_nothing_measures_is_an_error(sample: Any, problem: Any) -> None:
    problems = {"g": problem("g", verifier="none", domain="general")}
    with pytest.raises(InputError, match="neither a verifier nor constraints"):
        set_scores([sample("g", accuracy=None, rewards={})], problems, None)


def test_rows_of_sets_stand_in_the_closing_table_and_in_tables_of_their_own() -> None:
    of_set = {"pass@1": 0.5, "pass@1_ci95": [0.25, 0.75], "problems": 2, "samples": 4, "k": 2}
    table = {"r1": {"pass@1": 1.0, "problems": 3, "samples": 3, **in_set("gsm8k", of_set)}}
    assert by_set(table) == {"gsm8k": {"r1": of_set}}
    assert numbers(table["r1"]) == {
        "pass@1": 1.0,
        "gsm8k/pass@1": 0.5,
        "gsm8k/pass@1_low": 0.25,
        "gsm8k/pass@1_high": 0.75,
    }
    (section,) = set_sections(table)
    assert (section["name"], section["sizes"]) == ("gsm8k", "2 problems, 2 samples each, k = 2")
    assert section["rows"][0]["cells"] == [{"text": "50.0", "interval": "25.0–75.0", "best": False}]
    assert "# gsm8k: 2 problems" in markdown(table) and "| r1 | 50.0 | 25.0-75.0 |" in markdown(table)
