"""Figures of the fleet's benchmark, from logs that can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.fleet import figures
from benchmarks.fleet_simulator import TOKENS_MAX, tokens_of
from benchmarks.json_lines import read_lines

ROW = {
    **{"seconds": 1.0, "busy": 0.5, "tail_s": 0.1, "possible": 20, "made": 10, "tokens": 10},
    **{"lost": 0, "double": 0, "wrong": 0},
}


def endpoint(tokens: int, *log: tuple[float, int, bool]) -> dict:
    return {"slots": 2, "rate": 10.0, "done_tokens": tokens, "refused": 0, "failed": 0, "log": [(0.0, 0, True), *log]}


def test_two_endpoints_of_which_one_ends_first():
    """From 1 to 6: both have work in 3 of the 5 seconds, and the second has none in the last 2."""
    first = endpoint(30, (1.0, 1, True), (2.0, 2, True), (5.0, 1, True), (6.0, 0, True))
    second = endpoint(20, (1.0, 1, True), (4.0, 0, True))
    found = figures([first, second])
    assert (found["seconds"], found["tail_s"], found["possible"], found["made"]) == (5, 2, 100, 50)
    assert found["busy"] == pytest.approx(3 / 5)
    assert found["slots_used"] == pytest.approx((1 + 3 * 2 + 1 + 3) / 20)


def test_an_endpoint_that_is_down_is_not_expected_to_work():
    """The second dies at 3: from there on it counts neither as idle nor in what was possible."""
    first = endpoint(50, (1.0, 2, True), (6.0, 0, True))
    second = endpoint(0, (1.0, 1, True), (3.0, 0, False))
    found = figures([first, second])
    assert (found["busy"], found["tail_s"], found["possible"]) == (1.0, 0, 5 * 10 + 2 * 10)


def test_a_length_follows_from_the_seed():
    lengths = [tokens_of(seed) for seed in range(1000)]
    assert lengths == [tokens_of(seed) for seed in range(1000)]
    assert 700 < sorted(lengths)[500] < 900 and max(lengths) <= TOKENS_MAX


@pytest.mark.slow
def test_with_both_faults_each_sample_is_there_once(tmp_path: Path) -> None:
    """96 samples over 64 simulated endpoints, of which some are slow, hang, die, fail or refuse."""
    found = fleet.run(tmp_path / "run", 96, fleet.FAULTS["both"], fixed=False)
    assert (found["lost"], found["double"], found["wrong"]) == (0, 0, 0)
    assert found["made"] >= found["tokens"] > 0


def test_a_stopped_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Of six runs the fifth is stopped; the second command measures the last two only, and writes all rows."""
    ran: list[tuple[str, ...]] = []

    def run(folder: Path, samples: int, faults: list[str], fixed: bool) -> dict[str, Any]:
        if len(ran) == 4:
            ran.append(("stopped",))
            raise KeyboardInterrupt
        ran.append((*faults, str(fixed)))
        return ROW

    monkeypatch.setattr(fleet, "run", run)
    monkeypatch.setattr(fleet.os, "getloadavg", lambda: (0.25, 0.0, 0.0))
    page, journal = tmp_path / "page.md", tmp_path / "rows.jsonl"
    asked = ["--samples", "32", "--journal", str(journal), "--write", str(page)]
    with pytest.raises(KeyboardInterrupt):
        fleet.main(asked)
    assert len(read_lines(journal)) == 4
    assert fleet.main(asked) == 0
    assert ran[5:] == [("stragglers", "deaths", "False"), ("stragglers", "deaths", "True")]
    assert [row["samples"] for row in read_lines(journal)] == [32] * 6
    assert page.read_text().count("| 50% | 50% | 0.1 | 0.0% | 0 | 0 |") == 6
    assert "load average before each run: 0.2 to 0.2" in page.read_text() and "busy with" not in page.read_text()
    assert "| both | fixed parts | 1.0 |" in capsys.readouterr().out
    assert fleet.main([*asked[2:], "--samples", "48", "--faults", "deaths"]) == 0 and len(ran) == 8


@pytest.mark.parametrize("changed", ["commit", "machine"])
def test_a_row_of_another_commit_or_machine_is_measured_again(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page names the commit and the machine of its rows."""
    ran: list[bool] = []

    def run(folder: Path, samples: int, faults: list[str], fixed: bool) -> dict[str, Any]:
        ran.append(fixed)
        return ROW

    made = {"commit": "0ab", "machine": "2 cores"}
    monkeypatch.setattr(fleet, "run", run)
    monkeypatch.setattr(fleet, "made_with", lambda: made)
    page, journal = tmp_path / "page.md", tmp_path / "rows.jsonl"
    asked = ["--samples", "32", "--faults", "deaths", "--journal", str(journal), "--write", str(page)]
    assert fleet.main(asked) == 0 and fleet.main(asked) == 0 and len(ran) == 1
    made = made | {changed: "another"}
    assert fleet.main(asked) == 0 and len(ran) == 2
    assert [row[changed] for row in read_lines(journal)][1] == "another"
    assert f"at commit {made['commit']}, on {made['machine']}." in page.read_text()


def test_a_row_that_a_kill_cut_off_is_measured_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs the second's row is cut off. It is measured again, and then both are there."""
    ran: list[bool] = []

    def run(folder: Path, samples: int, faults: list[str], fixed: bool) -> dict[str, Any]:
        ran.append(fixed)
        return ROW

    monkeypatch.setattr(fleet, "run", run)
    journal = tmp_path / "rows.jsonl"
    asked = ["--samples", "32", "--faults", "none", "--journal", str(journal)]
    assert fleet.main(asked) == 0 and ran == [False, True]
    journal.write_text(journal.read_text().rstrip()[:-20])
    assert fleet.main(asked) == 0 and ran == [False, True, True]
    assert fleet.main(asked) == 0 and ran == [False, True, True]
