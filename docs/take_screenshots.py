"""Pictures of a day's work: a recipe and a stage from their forms, their pages, MLflow behind them, the report.

    pip install playwright; python docs/take_screenshots.py [--small] [--chromium PROGRAM] [--output docs/images]

It brings an installation up in a home of its own, works in a real Chromium as tests/flows/installation/test_browser.py
does, and stops where something that should be on a page is not. --small takes minutes less, for trying it out: its
curves show little.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.installation import Installation
from tests.support.pages import CHROMIUM, SMALL_R1, Pages, browser_page

MOST_BYTES = 200_000
DRAWN_MS = 2500
"""Charts are drawn after the text is there."""


class Pictures:
    """Pictures of what the browser shows, as small files."""

    def __init__(self, pages: Pages, folder: Path):
        self.pages, self.folder = pages, folder
        self.taken: set[str] = set()

    def take(self, name: str, *expected: str | re.Pattern[str]) -> None:
        """Wait until all of `expected` is on the page, and keep a picture."""
        for text in expected:
            self.pages.page.get_by_text(text).first.wait_for()
        self.pages.page.wait_for_timeout(DRAWN_MS)
        path = self.folder / f"{name}.png"
        self.pages.page.screenshot(path=path)
        with Image.open(path) as picture:
            picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
        self.taken.add(path.name)
        print(path, flush=True)


def recipe_run(pictures: Pictures, overrides: list[str]) -> str:
    """A recipe from its form, and its page while it goes on; the flow run's id."""
    pages = pictures.pages
    pages.open_form("train-r1")
    pages.add("overrides", "reasoning_rl.kl_coef=0.002")
    pictures.take("prefect-form", "overrides", "r1-cpu")
    pages.add("overrides", *overrides)
    id = pages.submit()
    pages.open_run(id, "Subflow Runs")
    pages.see(pages.page.get_by_role("link", name="reasoning_rl", exact=True))
    pages.open_run(id, "Artifacts")
    pictures.take("prefect-run", re.compile("of 11 stages done"))
    pages.see_state("Completed")
    return id


def stage_run(pictures: Pictures) -> None:
    """A single stage from its form, and what it made."""
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


def in_mlflow(pictures: Pictures, run: str, overrides: list[str]) -> str:
    """What is behind the link on the recipe run's page, and a second run beside the first; MLflow's id of the first."""
    pages, installation = pictures.pages, pictures.pages.installation
    pages.open_run(run, "Artifacts")
    pages.open_artifact("report-tiny")
    pictures.take("prefect-checkpoints", "dev1")
    pages.open_run(run, "Artifacts")
    pages.open_artifact("mlflow-tiny")
    pages.follow("Open in MLflow")
    pictures.take("mlflow-recipe-run", "train_r1 seed 0")
    parent = pages.page.url.partition("/runs/")[2].partition("/")[0].partition("?")[0]
    again = installation.start(overrides=[*overrides, "reasoning_rl.kl_coef=0.01"])
    installation.wait_for(again, "Completed")
    pages.compare("tiny", "train_r1 seed 0 reasoning_rl.kl_coef=0.01", "train_r1 seed 0 reasoning_rl.kl_coef=0.002")
    pages.page.get_by_role("rowheader", name="reasoning_rl.kl_coef", exact=True).scroll_into_view_if_needed()
    pictures.take("mlflow-compare", "reasoning_rl.kl_coef")
    # Last: a run whose stages are shown is ticked with all of them.
    pages.unfold("tiny", "train_r1 seed 0")
    pictures.take("mlflow-runs", "reasoning_rl", "sft_data")
    pages.open_curves("reasoning_rl seed 0", "^reward|^kl|^completion_tokens")
    pictures.take("mlflow-reasoning-rl", "reward_accuracy")
    return parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the recipe of the tests, instead of tiny as it is")
    parser.add_argument("--chromium", default=CHROMIUM)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, browser_page(given.chromium) as page:
        installation = Installation(Path(home))
        installation.up()
        try:
            pictures = Pictures(Pages(page, installation), given.output)
            overrides = SMALL_R1 if given.small else []
            run = recipe_run(pictures, overrides)
            stage_run(pictures)
            parent = in_mlflow(pictures, run, overrides)
            page.goto(Path(installation("report", parent).stdout.strip()).as_uri())
            pictures.take("report", "Checkpoints", "Pipeline")
        finally:
            installation.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
