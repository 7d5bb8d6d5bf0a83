"""Fuzz targets report how many inputs they saw."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "inputs":
                terminalreporter.write_line(f"{report.nodeid}: {value:,} inputs, {report.duration:.0f} s")
