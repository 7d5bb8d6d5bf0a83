"""SECURITY.md: every promise names a test that holds it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_promise_is_held_by_a_test_that_exists() -> None:
    table = (ROOT / "SECURITY.md").read_text().partition("| promise | held by |\n|---|---|\n")[2].partition("\n\n")[0]
    promises = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert len(promises) >= 12
    for promise, tests in promises:
        paths = re.findall(r"\]\((tests/[^)]+)\)", tests)
        assert paths and all("def test_" in (ROOT / path).read_text() for path in paths), promise
