"""Fuzz targets report how many inputs they saw, and add it to a journal where FUZZ_JOURNAL names one."""

from __future__ import annotations

import json
import os

import pytest

from tests.fuzz.log import record


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    journal = os.environ.get("FUZZ_JOURNAL")
    if not journal or (report.when != "call" and report.passed):
        return
    inputs = [int(str(value)) for name, value in report.user_properties if name == "inputs"]
    said = "" if report.passed else report.longreprtext.strip().splitlines()[-1]
    with open(journal, "a") as file:
        entry = record(report.nodeid, report.duration, sum(inputs), said, os.environ.get("FUZZ_COMMIT", ""))
        file.write(json.dumps(entry) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "inputs":
                terminalreporter.write_line(f"{report.nodeid}: {value:,} inputs, {report.duration:.0f} s")
