"""The closing table and completions side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.data.records import Sample, write_rows
from tasks.report.tables import completions, paper_rows

TABLE = {
    "dev1": {"pass@1": 0.5, "pass@1_ci95": [0.4, 0.6], "mean_tokens": 20.0, "refused_harmless": 0.1, "format": 1.0},
    "r1": {"pass@1": 0.75, "pass@1_ci95": [0.7, 0.8], "mean_tokens": 30.0, "refused_harmless": 0.2, "format": 1.0},
}


def test_the_papers_form_has_a_row_a_metric_and_marks_the_best() -> None:
    rows = {row["title"]: row["cells"] for row in paper_rows(TABLE)}
    assert [cell["text"] for cell in rows["pass@1"]] == ["50.0", "75.0"]
    assert [cell["interval"] for cell in rows["pass@1"]] == ["40.0–60.0", "70.0–80.0"]
    best = {title: [cell["best"] for cell in cells] for title, cells in rows.items()}
    assert best == {
        "pass@1": [False, True],
        "format kept": [False, False],  # all the same
        "tokens a completion": [False, False],  # neither way is better
        "refuses harmless": [True, False],  # less is better
    }


def test_negative_bounds_are_not_joined_by_a_dash() -> None:
    (row,) = paper_rows({"r1": {"alignment": 0.1, "alignment_ci95": [-0.2, 0.4]}})
    assert row["cells"][0]["interval"] == "-0.20 to 0.40"


def test_the_first_problems_of_each_domain_and_first_samples(problem: Any, sample: Any, tmp_path: Path) -> None:
    asked = [problem("a"), problem("b"), problem("g", domain="general", answer="")]
    for checkpoint, answer in (("dev1", "1"), ("r1", "3")):
        rows = [
            sample("b", answer="9"),
            sample("a", answer=answer, accuracy=float(answer == "3"), number=0),
            sample("a", answer="7", number=1),
            sample("g", accuracy=None, rewards={"helpful": 1.23456}, completion="x" * 5000),
        ]
        (tmp_path / checkpoint).mkdir()
        write_rows(tmp_path / checkpoint / "0.parquet", rows, Sample)
    found = completions(asked, {name: tmp_path / name for name in ("dev1", "r1")}, 1)
    assert [(item["domain"], item["number"], item["gold"]) for item in found] == [
        ("reasoning", 1, "3"),
        ("general", 1, ""),
    ]
    assert [(a["checkpoint"], a["rewards"]["accuracy"]) for a in found[0]["answers"]] == [("dev1", 0.0), ("r1", 1.0)]
    general = found[1]["answers"][0]
    assert general["rewards"] == {"helpful": 1.235} and general["text"].endswith("… 1,000 more characters")
