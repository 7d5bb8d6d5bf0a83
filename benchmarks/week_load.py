"""A week of a recipe that runs every six hours, by a clock that jumps a day at a time: does anything grow for good?

    pip install libfaketime; python -m benchmarks.week_load [--write docs/measured/load.md]

Each day: `r1 up`, the day's runs one behind the other from the deployment with a schedule, each with another setting
so that it makes another artifact; then what docs/operations.md recommends: `r1 prune --yes --runs-older-than DAYS` and
`mlflow gc`, while Prefect's server deletes what is older than DAYS by itself; then `r1 down`. All processes see the
day's clock through libfaketime (PyPI's package: under Debian's 0.9.10, `time.sleep` fails). Ends with 1 where the last
day leaves more than the first day after which something was old enough to go.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arguments import output_file
from benchmarks.extras import stop
from benchmarks.load_page import write_section
from benchmarks.machine import measured_by
from tests.support.installation import Installation

DAYS, A_DAY, KEPT_DAYS = 7, 4, 2
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SHOWN = {
    "artifacts": "artifacts",
    "MLflow runs": "runs in MLflow",
    "reports": "reports",
    "flow_run": "flow runs",
    "task_run": "task runs",
    "log": "log lines",
    "events": "events",
    "temporary": "left in /tmp",
    "logs_mb": "logs, MB",
    "databases_mb": "databases, MB",
    "write_ahead_mb": "their write-ahead logs, MB",
    "home_mb": "home, MB",
}
LOGS_MAX_MB = 32.0
"""Of one file: what `r1 up` keeps before it is cut."""
WRITE_AHEAD_MAX_MB = 32.0
"""SQLite writes to such a log from its beginning again once its pages, 4 MB by default and more while somebody reads,
are in the database, and leaves the file as long as it was."""
SLACK = 1.1
"""Times as much as on the day compared with: pages of databases are taken in steps."""


class Week(Installation):
    """An installation whose processes live on a later day."""

    def __init__(self, home: Path, temporary: Path, library: str):
        super().__init__(home)
        self.temporary, self.library, self.day = temporary, library, 0

    def environment(self) -> dict[str, str]:
        kept = f"P{KEPT_DAYS}D"
        return super().environment() | {
            "TMPDIR": str(self.temporary),
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "true",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": kept,
            "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": kept,
            "LD_PRELOAD": self.library,
            "FAKETIME": f"+{self.day}d",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",  # otherwise waiting threads of Prefect's server wake too late
            "FAKETIME_NO_CACHE": "1",
        }

    def live_a_day(self) -> dict[str, Any]:
        """The day's runs, its pruning, and what is there afterwards."""
        self.up()
        began = time.monotonic()
        for number in range(self.day * A_DAY, (self.day + 1) * A_DAY):
            self.complete(
                self.start("train-r1/train-r1-weekly", f"problems.held_out_max={20 + number}", only="problems")
            )
        seconds = time.monotonic() - began
        said = self("prune", "--yes", "--runs-older-than", str(KEPT_DAYS))
        assert said.returncode == 0, said.stderr
        print(said.stderr.strip(), flush=True)
        self.down()
        database = f"sqlite:///{self.home}/mlflow.db"
        command = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", database, "--tracking-uri", database]
        subprocess.run(command, env=self.environment(), check=True, stdout=subprocess.DEVNULL)
        verified = self("verify")
        assert verified.returncode == 0, verified.stdout
        return {"day": self.day + 1, "seconds": round(seconds), **self.count()}

    def complete(self, run_id: str) -> None:
        """Waits for a flow run, which must succeed."""
        while (state := self.runs(id={"any_": [run_id]})[0]["state"]["type"]) not in ENDED:
            time.sleep(5)
        assert state == "COMPLETED", state

    def count(self) -> dict[str, float]:
        """What an installation that is down has left on the disk; the home without the databases' write-ahead logs."""
        databases = self.home / "mlflow.db", self.home / "prefect" / "prefect.db"
        write_ahead = sum(size_mb(log) for path in databases if (log := path.with_name(f"{path.name}-wal")).is_file())
        counted: dict[str, int] = {}
        for path, tables in zip(databases, (("runs",), ("flow_run", "task_run", "log", "events")), strict=True):
            with contextlib.closing(sqlite3.connect(path)) as records:
                counted |= {name: records.execute(f"select count(*) from {name}").fetchone()[0] for name in tables}
        return {
            "artifacts": len(list(self.home.glob("artifacts/*/*/*"))),
            "MLflow runs": counted.pop("runs"),
            "reports": len(list(self.home.glob("reports/*"))),
            **counted,
            "temporary": len(list(self.temporary.iterdir())),
            "logs_mb": size_mb(self.home / "logs"),
            "databases_mb": sum(map(size_mb, databases)),
            "write_ahead_mb": write_ahead,
            "home_mb": size_mb(self.home),
        }


def size_mb(path: Path) -> float:
    """Size of a file or of all files below a folder; hard links count once."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum({(s.st_dev, s.st_ino): s.st_size for s in map(os.stat, files)}.values()) / 1e6


def faketime_library() -> str:
    """The shared library of the package libfaketime, which is not imported: on import it replaces Python's clock."""
    package = importlib.util.find_spec("libfaketime")
    if package is None or package.origin is None:
        stop("libfaketime is not installed: pip install libfaketime")
    return str(Path(package.origin).parent / "vendor/libfaketime/src/libfaketime.so.1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=DAYS)
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the section into this page")
    args = parser.parse_args()
    library = faketime_library()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (temporary := Path(folder) / "tmp").mkdir()
        week = Week(Path(folder) / "home", temporary, library)
        for week.day in range(args.days):
            try:
                rows.append(week.live_a_day())
            finally:
                week.down()
            print(json.dumps(rows[-1]), flush=True)
    grown = growth(rows)
    text = page(rows, grown)
    print(text)
    if args.write:
        write_section(args.write, text)
    return 1 if grown else 0


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """What the last day left more of than the first day after which something was old enough to go. Logs may grow up to
    their largest size."""
    first, last = rows[min(KEPT_DAYS + 1, len(rows) - 1)], rows[-1]
    allowed = {name: SLACK * first[name] for name in SHOWN}
    allowed |= {"logs_mb": LOGS_MAX_MB, "write_ahead_mb": WRITE_AHEAD_MAX_MB}
    return [name for name in SHOWN if last[name] > allowed[name]]


def page(rows: list[dict[str, Any]], grown: list[str]) -> str:
    """The figures as a section of a page."""
    lines = [
        "## A week of a recipe that runs every six hours",
        "",
        measured_by("python -m benchmarks.week_load"),
        "",
        f"{A_DAY} runs a day of the stage `problems` of `tiny`, made smaller, each with another setting.",
        f"After each day `r1 prune --yes --runs-older-than {KEPT_DAYS}`, then `mlflow gc`; Prefect's server, too,",
        f"keeps {KEPT_DAYS} days. What is there at the end of each day:",
        "",
        "| day | " + " | ".join(SHOWN.values()) + " |",
        "|--:" * (1 + len(SHOWN)) + "|",
    ]
    for row in rows:
        cells = [f"{row[name]:.1f}" if name.endswith("_mb") else f"{row[name]:,}" for name in SHOWN]
        lines.append("| " + " | ".join([str(row["day"]), *cells]) + " |")
    named = ", ".join(SHOWN[name] for name in grown)
    lines += [
        "",
        "`r1 up` cuts each log at 16 MB and keeps the 16 MB before, so logs grow up to that. Write-ahead logs are",
    ]
    lines += ["as long as they once had to be; the home is counted without them."]
    lines += ["", f"Grown from day {min(KEPT_DAYS + 2, len(rows))} to day {rows[-1]['day']}: {named or 'nothing'}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
