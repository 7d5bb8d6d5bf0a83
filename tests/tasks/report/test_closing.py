"""The closing table in a terminal."""

from __future__ import annotations

from tasks.report.closing import closing_lines, grid

TABLE = {
    "dev1": {"pass@1": 0.5, "pass@1_ci95": [0.4, 0.6], "mean_tokens": 20.0, "format": 1.0},
    "r1": {"pass@1": 0.75, "pass@1_ci95": [0.7, 0.8], "mean_tokens": 30.0, "format": 1.0},
}


def test_a_row_a_metric_with_its_interval_below() -> None:
    assert list(closing_lines(TABLE)) == [
        "                          dev1         r1",
        "pass@1                    50.0       75.0",
        "  interval           40.0–60.0  70.0–80.0",
        "format kept              100.0      100.0",
        "tokens a completion       20.0       30.0",
    ]


def test_checkpoints_that_do_not_fit_stand_below() -> None:
    many = {f"student_{number}": TABLE["r1"] for number in range(12)}
    lines = list(closing_lines(many))
    assert max(map(len, lines)) <= 100
    heads = [line.split() for line in lines if "student" in line]
    assert [name for head in heads for name in head] == list(many) and len(heads) == 2
    assert lines.count("") == 1
    alone = [line for line in grid(many, 30) if "student" in line]
    assert len(alone) == 12  # one a block where there is no room for two


def test_a_test_set_has_a_table_of_its_own() -> None:
    row = {"pass@1": 0.5, "gsm8k/pass@1": 0.25, "gsm8k/problems": 8, "gsm8k/samples": 16, "gsm8k/k": 2}
    assert list(closing_lines({"r1": row})) == [
        "          r1",
        "pass@1  50.0",
        "\ngsm8k: 8 problems, 2 samples each, k = 2",
        "          r1",
        "pass@1  25.0",
    ]


def test_counts_of_an_evaluation_without_a_recipe() -> None:
    table = {"gsm8k": {"problems": 8, "samples": 16, "k": 2, "pass@1": 0.25}}
    assert list(grid(table, counts=True)) == [
        "          gsm8k",
        "problems      8",
        "samples      16",
        "k             2",
        "pass@1     25.0",
    ]
