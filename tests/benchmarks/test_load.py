"""The page of the benchmarks of load, and what they call growth."""

from __future__ import annotations

from pathlib import Path

from benchmarks import week_load
from benchmarks.load_page import TITLE, write_section


def test_a_section_replaces_the_one_with_its_title(tmp_path: Path) -> None:
    page = tmp_path / "load.md"
    write_section(page, "## Queue\n\nfirst\n")
    write_section(page, "## Week\n\nwords\n")
    write_section(page, "## Queue\n\nsecond\n")
    assert page.read_text() == f"{TITLE}\n## Queue\n\nsecond\n\n## Week\n\nwords\n"


def test_growth_is_what_the_last_day_leaves_more_of_than_the_first_full_one() -> None:
    level = dict.fromkeys(week_load.SHOWN, 100.0) | {"logs_mb": 1.0, "write_ahead_mb": 4.0}
    rows = [{"day": day + 1, **level} for day in range(7)]
    rows[0]["log"] = rows[1]["log"] = 10.0  # nothing was old enough to go
    assert week_load.growth(rows) == []
    rows[-1] |= {"events": 111.0, "home_mb": 109.0, "logs_mb": 31.0, "write_ahead_mb": 8.0}  # up to 32 MB
    assert week_load.growth(rows) == ["events"]
    assert "Grown from day 4 to day 7: events." in week_load.page(rows, ["events"])
