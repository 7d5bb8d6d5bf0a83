"""A day's work in a real browser: a recipe and a stage from their forms, their pages, MLflow behind them, two runs
compared. A whole installation, real runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.installation import Installation

pytest.importorskip("playwright.sync_api", reason="playwright is missing: make install")

from tests.support.pages import CHROMIUM, SMALL_R1, Pages, browser_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium"),
]


@pytest.fixture(scope="module")
def pages(r1flow: Installation) -> Iterator[Pages]:
    with browser_page() as page:
        yield Pages(page, r1flow)


@pytest.fixture(scope="module")
def recipe_run(pages: Pages) -> str:
    """The id of a flow run of the recipe, started from its form."""
    pages.open_form("train-r1")
    pages.add("overrides", *SMALL_R1)
    return pages.submit()


@pytest.fixture(scope="module")
def finished(pages: Pages, recipe_run: str) -> str:
    """The same, once its page says that it is done."""
    pages.open_run(recipe_run, "Artifacts")
    pages.see(pages.page.get_by_text(re.compile(r"^\d+ of 11 stages done · ")))
    pages.open_run(recipe_run, "Subflow Runs")
    for stage in ("base", "reasoning_rl", "report"):
        pages.see(pages.page.get_by_role("link", name=re.compile(f"^{stage} tiny seed 0")))
    pages.see_state("Completed")
    return recipe_run


def manifest(installation: Installation, stage: str) -> dict[str, Any]:
    """The newest artifact of a stage."""
    found = [json.loads(p.read_text()) for p in installation.home.glob(f"artifacts/{stage}/*/*/manifest.json")]
    return max(found, key=lambda values: values["created"])


def test_a_recipe_started_from_its_form_shows_stages_progress_and_result(pages: Pages, finished: str) -> None:
    pages.open_run(finished, "Artifacts")
    pages.page.get_by_text("11 of 11 stages done").first.wait_for()
    pages.open_artifact("report-tiny")
    for checkpoint in ("dev1", "dev2", "dev3", "r1"):
        pages.page.get_by_role("cell", name=checkpoint, exact=True).wait_for()


def test_the_logs_say_what_the_recipe_and_its_stages_did(pages: Pages, r1flow: Installation, finished: str) -> None:
    pages.open_run(finished, "Logs")
    pages.page.get_by_text("stage 11 of 11: report").first.wait_for()
    (stage,) = r1flow.stage("reasoning_rl")
    pages.open_run(stage["id"], "Logs")
    pages.page.get_by_text(re.compile(r"reasoning_rl: step 6/6 · reward")).first.wait_for()
    pages.page.get_by_text(re.compile("reasoning_rl: made in ")).first.wait_for()


def test_the_report_opens_from_the_runs_page(pages: Pages, finished: str) -> None:
    pages.open_run(finished, "Artifacts")
    pages.open_artifact("report-page-tiny")
    href = pages.page.get_by_role("link", name="The report of this run").first.get_attribute("href")
    assert href and href.startswith(f"{pages.prefect}/r1-reports/")
    pages.page.goto(href)
    pages.page.get_by_text("Checkpoints").first.wait_for()
    assert pages.page.evaluate("self.origin") == "null"  # an origin of its own, without Prefect's password


def test_one_stage_of_a_recipe_is_chosen_from_a_list(pages: Pages, r1flow: Installation) -> None:
    pages.open_form("train-r1")
    pages.choose("only", "problems")
    pages.add("overrides", *(value for value in SMALL_R1 if value.startswith("problems.")))
    run = pages.submit()
    assert r1flow.run(run)["parameters"]["only"] == "problems"
    pages.open_run(run, "Logs")
    pages.see_state("Completed")
    pages.see(pages.page.get_by_text("stage 1 of 1: problems"))


def test_a_schedule_is_switched_on_and_off(pages: Pages, r1flow: Installation) -> None:
    id = pages.open_deployment("train-r1", "train-r1-weekly")

    def active() -> bool:
        (schedule,) = r1flow.ask("GET", f"/deployments/{id}/schedules")
        return bool(schedule["active"])

    def switched(on: bool) -> bool:
        switch = pages.page.get_by_role("switch").first
        if switch.get_attribute("aria-checked") != str(on).lower():
            switch.click()  # again where the page was not ready for it
            pages.page.wait_for_timeout(3000)
        return active() is on

    for on in (True, False):
        r1flow.wait(partial(switched, on), f"the schedule {'on' if on else 'off'}")


def test_the_runs_page_leads_to_mlflow_with_its_stages(pages: Pages, finished: str) -> None:
    pages.open_run(finished, "Artifacts")
    pages.open_artifact("mlflow-tiny")
    pages.follow("Open in MLflow")
    pages.page.get_by_text("tiny seed 0 · problems.sources").first.wait_for()
    assert pages.mlflow in pages.page.url
    pages.page.get_by_text("Load more").click()  # ten of its eleven stages are there
    for stage in ("problems", "reasoning_rl", "evaluate"):
        pages.page.get_by_role("link", name=f"{stage} tiny seed 0").first.wait_for()


def test_a_single_stage_started_from_its_form(pages: Pages, r1flow: Installation, finished: str) -> None:
    base, before = manifest(r1flow, "base"), manifest(r1flow, "sft")
    pages.open_form("sft")
    pages.fill("inputs", json.dumps({"base": base["key"][:12], "sft_data": "latest"}))
    pages.fill("seed", "1")
    pages.fill("Epochs", "1")
    run = pages.submit()
    pages.open_run(run)
    pages.see_state("Completed")
    made = manifest(r1flow, "sft")
    assert made["key"] != before["key"]
    assert made["config"] == {**made["config"], "seed": 1, "epochs": 1}
    assert made["inputs"]["base"]["digest"] == base["digest"]
    pages.open_run(run, "Artifacts")
    pages.page.get_by_text(re.compile(r"step (\d+)/\1")).first.wait_for()  # its bar is full
    pages.open_artifact("result-sft")
    pages.page.get_by_text(f"r1 show {made['key'][:12]}").wait_for()


def test_the_evaluations_form_as_it_opens_is_taken(pages: Pages, r1flow: Installation, finished: str) -> None:
    pages.open_form("evaluate")
    pages.fill("Problems", "8")
    pages.fill("General", "8")
    run = pages.submit()
    pages.open_run(run)
    pages.see_state("Completed")
    assert manifest(r1flow, "evaluate")["config"]["problems"] == 8


def test_a_stage_that_does_not_exist_is_said_on_the_runs_page(pages: Pages) -> None:
    pages.open_form("train-distill")  # whose students have any names
    pages.field("only").get_by_role("button", name="Another name").click()
    pages.fill("only", "student_nobody")
    pages.open_run(pages.submit())
    pages.see_state("Failed")
    pages.page.get_by_text("unknown stage 'student_nobody'; the stages are problems, base").first.wait_for()


def test_two_runs_are_compared_in_mlflow(pages: Pages, r1flow: Installation, finished: str) -> None:
    others = [value for value in SMALL_R1 if not value.startswith("evaluate.problems")]
    again = r1flow.start(overrides=["evaluate.problems=16", *others])
    r1flow.wait_for(again, "Completed")
    # The run of `problems` alone has the same three overrides first, and fewer others.
    first = f"{' · '.join(['tiny seed 0', *SMALL_R1[:3]])} · {len(SMALL_R1) - 3} more"
    pages.compare("tiny", "tiny seed 0 · evaluate.problems=16", first)
    field = pages.page.get_by_role("rowheader", name="evaluate.problems", exact=True)
    row = pages.page.get_by_role("row").filter(has=field)
    row.wait_for()
    assert re.findall(r"\b(16|24)\b", row.inner_text()) in (["16", "24"], ["24", "16"])
    pages.page.get_by_text(re.compile("/base$")).first.wait_for()  # of the metrics only those in sight are drawn
