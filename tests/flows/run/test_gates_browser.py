"""A gate that asks, answered by a person: a real browser, a real Prefect server, real runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect_server import DEADLINE_S, Server, decision, start_run, wait
from tests.support.r1 import R1, SMALLER

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make install")
CHROMIUM = shutil.which("chromium")
STAGE_1 = [
    *(value for value in SMALLER if value.startswith(("problems.", "base."))),
    *("r1_zero.steps=12", "r1_zero.prompts_per_step=8", "cold_start_from_zero.problems=80"),
    *("cold_start_sft.epochs=1", "evaluate.problems=24", "evaluate.general=0"),
]
REVIEW = 'gates=[{name = "readable", after = "cold_start_data", review = 3, on_failure = "ask"}]'
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "prefect").mkdir()
    server = Server(tmp_path / "prefect")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET, timeout=DEADLINE_S * 1000)
        page = browser.new_page()
        page.set_default_timeout(DEADLINE_S * 1000)
        yield page
        browser.close()


def open_form(page: Any, server: Server, run: dict[str, Any]) -> Any:
    """The form that the run's page opens to resume it, with the evidence in it, whole."""
    page.goto(f"{server.url.removesuffix('/api')}/runs/flow-run/{run['id']}")
    page.get_by_role("button", name="Resume").click()
    form = page.locator(".p-modal__card")
    evidence = form.get_by_text("reasoning_train of problems is ")
    evidence.wait_for()
    assert evidence.inner_text().endswith("must be above 1e+06")
    edges = [box["x"] + box["width"] for box in (evidence.bounding_box(), form.bounding_box())]
    assert edges[0] <= edges[1]
    return form


def submit(page: Any, form: Any, **texts: str) -> None:
    """Fill in and send; again where the server's database is busy, as a person would."""
    for name, text in texts.items():
        form.locator(".schema-form-property", has_text=f"{name} (Optional)").get_by_role("textbox").fill(text)

    def sent() -> bool:
        with page.expect_response("**/resume") as answer:
            form.get_by_role("button", name="Submit").click()
        return answer.value.status != 503

    wait(sent, "an answer")
    form.wait_for(state="hidden")


def test_approval_after_the_servers_restart(server: Server, page: Any, tmp_path: Path) -> None:
    r1 = R1(tmp_path / "home")
    process = start_run(r1, server)
    run = wait(lambda: server.run_in("Paused"), "the pause")
    open_form(page, server, run)
    server.stop()
    server.start()
    form = open_form(page, server, run)
    form.get_by_role("switch").click()
    form.get_by_role("switch", checked=True).wait_for()
    submit(page, form, Note="on purpose", Who="Ada")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    assert json.loads(output.splitlines()[-1])["gates"][0]["status"] == "approved"
    decided = decision(r1)
    assert (decided["approved"], decided["who"], decided["note"]) == (True, "Ada", "on purpose")
    page.get_by_text("Completed").first.wait_for()


def test_refusal(server: Server, page: Any, tmp_path: Path) -> None:
    r1 = R1(tmp_path / "home")
    process = start_run(r1, server)
    run = wait(lambda: server.run_in("Paused"), "the pause")
    submit(page, open_form(page, server, run), Note="too few")  # the switch is off until somebody moves it
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1] == (
        "stopped: gate 'enough' after problems was refused by someone in Prefect: too few"
    )
    assert decision(r1)["approved"] is False
    page.get_by_text("Failed").first.wait_for()


def test_a_person_reviews_the_rewritten_trajectories(server: Server, page: Any, tmp_path: Path) -> None:
    """Stage 1 as published: R1-Zero, its trajectories rewritten, a person who looks at samples, Dev1."""
    r1 = R1(tmp_path / "home")
    process = start_run(r1, server, [*STAGE_1, REVIEW], ["--flow", "dev1"])
    run = wait(lambda: server.run_in("Paused", flow="train-dev1"), "the pause")
    page.goto(f"{server.url.removesuffix('/api')}/runs/flow-run/{run['id']}")
    page.get_by_role("button", name="Resume").click()
    form = page.locator(".p-modal__card")
    form.get_by_text("Gate readable after cold_start_data: to be reviewed").wait_for()
    form.get_by_text("Sample 3").wait_for()
    texts = form.locator("pre").all_inner_texts()  # of each sample: prompt, original, completion
    assert len(texts) == 9 and all(text.startswith(("compute ", "berechne ")) for text in texts[::3])
    assert all("<answer>" in text for text in (*texts[1::3], *texts[2::3]))
    form.get_by_role("switch").click()
    form.get_by_role("switch", checked=True).wait_for()
    submit(page, form, Note="readable", Who="Ada")
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-2000:]
    result = json.loads(output.splitlines()[-1])
    assert [stage["name"] for stage in result["stages"]] == [
        *("problems", "base", "r1_zero", "cold_start_data", "cold_start_sft", "evaluate", "report")
    ]
    assert result["gates"][0]["status"] == "approved" and decision(r1)["note"] == "readable"
    counts = next(stage for stage in result["stages"] if stage["name"] == "cold_start_data")
    manifest = json.loads(next(r1.home.glob(f"artifacts/cold_start_data/{counts['key']}/1/manifest.json")).read_text())
    assert set(manifest["inputs"]) == {"problems", "base", "r1_zero"}
    # Every chosen trajectory is rewritten; those that pass the filters again are the data.
    written = {k: v for k, v in manifest["counts"].items() if not k.startswith("trajectories_")}
    assert sum(written.values()) == manifest["counts"]["trajectories_chosen"] and written["kept"] > 0
    assert result["checkpoints"].keys() == {"base", "zero", "dev1"}
