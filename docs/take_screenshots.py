"""Takes the pictures in docs/images: forms and pages in Prefect, runs in MLflow, the report of the demo.

    pip install playwright; python docs/take_screenshots.py [--home FOLDER] [--small] [--chromium PROGRAM]

Brings an installation up in a temporary home, works in a real Chromium as tests/flows/installation/test_browser.py
does, and stops where something that should be on a page is not. The home begins with the recipe `tiny`, run once; with
--home it begins as a copy of one where that has been done already, which saves minutes. --small takes the recipe of
the tests, for trying the script out: its curves show little.

docs/images/taken_at.json records the commit, the date and the digest of the recipe. tests/test_docs.py fails when the
recipe has changed since, but for sections of other flows.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.installation import Installation
from tests.support.pages import CHROMIUM, SMALL_R1, Pages, browser_page
from tests.support.r1 import pictured_digest

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "flows/recipes/tiny.toml"
DEMO = "tiny seed 0"
CHANGE = "reasoning_rl.kl_coef=0.002"
"""What the second run changes, so that there is something to compare."""
LARGEST_BYTES = 200_000
DRAW_MS = 2500
"""Charts are drawn after the text is there."""


class Pictures:
    """Pictures of what the browser shows, as small files."""

    def __init__(self, pages: Pages, folder: Path):
        self.pages, self.folder = pages, folder
        self.names: list[str] = []

    def take(self, name: str, *expected: str | re.Pattern[str]) -> None:
        """Wait until all of `expected` is on the page, then save a picture."""
        for text in expected:
            self.pages.page.get_by_text(text).first.wait_for()
        self.pages.page.wait_for_timeout(DRAW_MS)
        path = self.folder / f"{name}.png"
        self.pages.page.screenshot(path=path)
        with Image.open(path) as picture:
            picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < LARGEST_BYTES, f"{path} has {path.stat().st_size} bytes"
        self.names.append(path.name)
        print(path, flush=True)


def copy_home(source: Path, target: Path) -> None:
    """Copy a home whose recipe has run. MLflow's database names its files by absolute paths, which are replaced."""
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("prefect", "logs", "up.json"))
    with sqlite3.connect(target / "mlflow.db") as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for column in [row[1] for row in database.execute(f'PRAGMA table_info("{table}")') if "CHAR" in row[2]]:
                database.execute(
                    f'UPDATE "{table}" SET "{column}" = replace("{column}", ?, ?) WHERE "{column}" LIKE ?',
                    (f"{source}/", f"{target}/", f"%{source}/%"),
                )


def recipe_run(pictures: Pictures, overrides: list[str]) -> str:
    """Start a recipe from its form and show its page while it runs. Returns the flow run's id."""
    pages = pictures.pages
    pages.open_form("train-r1")
    pages.add("overrides", CHANGE)
    pictures.take("prefect-form", "overrides", "r1-cpu")
    pages.add("overrides", *overrides)
    id = pages.submit()
    pages.open_run(id, "Subflow Runs")
    pages.see(pages.page.get_by_role("link", name=re.compile("^reasoning_rl tiny seed 0")))
    pages.open_run(id, "Artifacts")
    pictures.take("prefect-run", re.compile("of 11 stages done"))
    pages.see_state("Completed")
    return id


def stage_run(pictures: Pictures) -> None:
    """Start a single stage from its form and show its result."""
    pages = pictures.pages
    pages.open_form("sft")
    pages.fill("inputs", json.dumps({"base": "latest", "sft_data": "latest"}))
    pages.fill("seed", "1")
    pictures.take("prefect-stage-form", "inputs", "r1-gpu")
    id = pages.submit()
    pages.open_run(id)
    pages.see_state("Completed")
    pages.open_run(id, "Artifacts")
    pages.open_artifact("result-sft")
    pictures.take("prefect-stage-result", "sft: made in")


def schedule(pictures: Pictures) -> None:
    """Show a deployment with a schedule and the switch that turns it on."""
    pictures.pages.open_deployment("train-r1", "train-r1-weekly")
    pictures.pages.page.get_by_role("switch").first.wait_for()
    pictures.take("prefect-schedule", "Schedules", "weekly")


def in_mlflow(pictures: Pictures, run: str) -> None:
    """Show the run behind the link on the recipe run's page, then the demo beside it, then the demo's curves."""
    pages, page = pictures.pages, pictures.pages.page
    pages.open_run(run, "Artifacts")
    pages.open_artifact("report-tiny")
    pictures.take("prefect-checkpoints", "dev1")
    pages.open_run(run, "Artifacts")
    pages.open_artifact("mlflow-tiny")
    pages.follow("Open in MLflow")
    pictures.take("mlflow-recipe-run", f"{DEMO} · {CHANGE}")
    runs = f"{pages.experiment('tiny')}/runs"
    pages.open_mlflow(runs)
    for name in (f"{DEMO} · {CHANGE}", DEMO):
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))
        row.get_by_role("checkbox").first.check()
    page.get_by_test_id("runs-compare-button").click()
    page.get_by_text("Comparing 2 Runs").first.wait_for()
    page.get_by_role("rowheader", name="reasoning_rl.kl_coef", exact=True).scroll_into_view_if_needed()
    pictures.take("mlflow-compare", "reasoning_rl.kl_coef")
    # Last, because a run is ticked with all the stages that are shown.
    pages.open_mlflow(runs)
    page.locator(f"[role=gridcell] button:left-of(:text-is('{DEMO}'))").first.click()
    pictures.take("mlflow-runs", "reasoning_rl", "sft_data")
    pages.open_curves("reasoning_rl tiny seed 0", "^reward|^kl|^completion_tokens")
    pictures.take("mlflow-reasoning-rl", "reward_accuracy")


def record(folder: Path, names: list[str]) -> None:
    """Write which pictures were taken, and at which commit and version of the recipe."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    taken = {
        "commit": commit.stdout.strip(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "recipe": RECIPE.relative_to(ROOT).as_posix(),
        "sha256": pictured_digest(RECIPE),
        "pictures": sorted(names),
    }
    (folder / "taken_at.json").write_text(json.dumps(taken, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="a home where `r1 run tiny` is done; it is copied, never changed")
    parser.add_argument("--small", action="store_true", help="the recipe of the tests instead of tiny as it is")
    parser.add_argument("--chromium", default=CHROMIUM)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    overrides = SMALL_R1 if arguments.small else []
    with tempfile.TemporaryDirectory(prefix="r1flow-") as home, browser_page(arguments.chromium) as page:
        if arguments.home:
            copy_home(arguments.home.resolve(), Path(home))
        installation = Installation(Path(home))
        installation.up()
        try:
            if not arguments.home:
                demo = installation("run", "tiny", *(part for value in overrides for part in ("--set", value)))
                assert demo.returncode == 0, demo.stderr[-3000:]
            pictures = Pictures(Pages(page, installation), arguments.output)
            report = installation("report", "latest")
            assert report.returncode == 0, report.stderr[-3000:]
            page.goto(Path(report.stdout.strip()).as_uri())
            pictures.take("report", "Checkpoints", "Pipeline")
            run = recipe_run(pictures, overrides)
            stage_run(pictures)
            schedule(pictures)
            in_mlflow(pictures, run)
        finally:
            installation.down()
    if not arguments.small:
        record(arguments.output, pictures.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
