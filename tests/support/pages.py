"""Prefect's and MLflow's pages as a person uses them in a browser: for their test, and for the pictures in docs."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, TimeoutError, sync_playwright

from flows.installation.services import sign_in_url
from tests.support.installation import DEADLINE_S, Installation
from tests.support.r1 import SMALLER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FEW_FRAMES = "window.requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), 250);"
"""Prefect's graph of a run is drawn anew each frame, which without a graphics card takes a core from what runs."""
SIZE = (1500, 1000)
LOOK_S = 30
SEND_S = 300
SMALL_R1 = [
    value for value in SMALLER if not value.startswith(("r1_zero", "distill", "rlhf_ppo", "process_reward_model"))
]
"""Overrides that make the full recipe small."""


@contextlib.contextmanager
def browser_page(chromium: str | None = CHROMIUM) -> Iterator[Page]:
    """An empty page of a real Chromium; what is waited for on it has a deadline for busy machines."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=QUIET, timeout=DEADLINE_S * 1000)
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, reduced_motion="reduce")
        page.add_init_script(FEW_FRAMES)
        page.set_default_timeout(DEADLINE_S * 1000)
        yield page
        browser.close()


class Pages:
    """The pages of one installation, one after the other in one tab."""

    def __init__(self, page: Page, installation: Installation):
        self.page, self.installation = page, installation
        self.prefect = f"http://127.0.0.1:{installation.prefect_port}"
        self.mlflow = f"http://127.0.0.1:{installation.mlflow_port}"
        page.goto(sign_in_url(installation.home, installation.prefect_port))

    # ---- Prefect: deployments and forms ----

    def open_deployment(self, flow: str, name: str) -> str:
        """The page of a deployment; its id."""
        deployment = self.installation.ask("GET", f"/deployments/name/{flow}/{name}")
        self.page.goto(f"{self.prefect}/deployments/deployment/{deployment['id']}")
        return str(deployment["id"])

    def open_form(self, flow: str) -> None:
        """The form of a flow's deployment, by its Run button."""
        self.open_deployment(flow, flow)
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_text("Custom run").click()
        self.page.get_by_role("button", name="Submit").wait_for()

    def field(self, name: str) -> Locator:
        """A field of the form with all that belongs to it, by its label."""
        words = re.compile(rf"^{name}( \(Optional\))?$")
        label = self.page.locator(".schema-form-property__label").filter(has_text=words)
        inner = "ancestor::*[contains(concat(' ', normalize-space(@class), ' '), ' schema-form-property ')][1]"
        return label.first.locator(f"xpath={inner}")

    def fill(self, name: str, text: str) -> None:
        """Text, a number, or JSON where the field takes it."""
        self.field(name).locator("input, textarea").first.fill(text)

    def add(self, name: str, *items: str) -> None:
        """Items to a field that is a list."""
        boxes = self.field(name).get_by_role("textbox")
        for item in items:
            there = boxes.count()
            self.field(name).get_by_role("button", name="Add item").click()
            boxes.nth(there).fill(item)  # waits for it; the last one may still be the one before

    def choose(self, name: str, option: str) -> None:
        """One of the values that a field lists."""
        control = self.field(name).locator(".p-select-button__control").first
        control.focus()
        control.press("Space")  # a click may open and close it
        self.page.locator(".p-select-option").filter(has_text=re.compile(rf"^\s*{re.escape(option)}\s*$")).first.click()

    def submit(self) -> str:
        """Send the form, again where the server is too busy; the id of the flow run."""

        def sent() -> Any:
            # A form that finds its values wrong sends nothing.
            with self.page.expect_response("**/create_flow_run", timeout=SEND_S * 1000) as answer:
                self.page.get_by_role("button", name="Submit").click()
            assert answer.value.status in (201, 503), answer.value.text()
            return answer.value.json()["id"] if answer.value.status == 201 else None

        return str(self.installation.wait(sent, "an answer to the form"))

    # ---- Prefect: the page of a run ----

    def open_run(self, id: str, tab: str = "Logs") -> None:
        self._run = id, tab

        def opened() -> bool:
            # A busy server may never send the last of the page, which nobody waits for.
            address = f"{self.prefect}/runs/flow-run/{id}"
            try:
                self.page.goto(address, wait_until="commit", timeout=LOOK_S * 1000)
                self.page.get_by_role("tablist").get_by_text(tab, exact=True).click(timeout=LOOK_S * 1000)
            except TimeoutError:  # nor the first of it
                return False
            return True

        self.installation.wait(opened, f"the tab {tab} of flow run {id}")

    def see_state(self, *names: str) -> str:
        """Wait until the run's badge says one of these, and return it."""
        badge = self.page.locator(".state-badge").filter(has_text=re.compile(rf"^\s*({'|'.join(names)})\s*$")).first
        self.see(badge)
        return badge.inner_text().strip()

    def see(self, seen: Locator) -> None:
        """Wait for something on a run's page, which does not fetch all of itself again: as people do, open it anew."""

        def there() -> bool:
            try:
                seen.first.wait_for(timeout=LOOK_S * 1000)
            except TimeoutError:
                self.open_run(*self._run)  # loaded again, the page would be at its first tab
                return False
            return True

        self.installation.wait(there, str(seen))

    def open_artifact(self, key: str) -> None:
        """Open one of the run's artifacts from the run's page."""
        self.page.get_by_text(key, exact=True).first.click()
        self.page.wait_for_url("**/artifacts/**")

    def follow(self, link: str) -> None:
        """Go where a link on the page leads."""
        href = self.page.get_by_role("link", name=link).first.get_attribute("href")
        assert href, f"{link} leads nowhere"
        self.open_mlflow(href)

    # ---- MLflow ----

    def open_mlflow(self, url: str) -> None:
        """A page of MLflow, without the assistant that it opens beside the first one."""
        self.page.goto(url)
        with contextlib.suppress(TimeoutError):
            self.page.get_by_text("MLflow Assistant").first.wait_for(timeout=5000)
            self.page.locator('button:right-of(:text-is("Beta"))').nth(2).click(timeout=5000)

    def experiment(self, name: str) -> str:
        """The address of an experiment."""
        asked = httpx.get(
            f"{self.mlflow}/api/2.0/mlflow/experiments/get-by-name", params={"experiment_name": name}, timeout=120
        )
        asked.raise_for_status()
        return f"{self.mlflow}/#/experiments/{asked.json()['experiment']['experiment_id']}"

    def unfold(self, experiment: str, run: str) -> None:
        """Show the stages of a run of the recipe in the list of its experiment."""
        self.open_mlflow(f"{self.experiment(experiment)}/runs")
        self.page.locator(f"[role=gridcell] button:left-of(:text('{run}'))").first.click()

    def open_curves(self, run: str, search: str) -> None:
        """From a list of runs to the curves of one of them, by the beginning of its name."""
        href = self.page.get_by_role("link", name=run).first.get_attribute("href")
        assert href, f"no run {run}"
        self.open_mlflow(f"{self.mlflow}/{href.lstrip('/').partition('?')[0]}/model-metrics")
        self.page.get_by_placeholder("Search metric charts").fill(search)

    def compare(self, experiment: str, *runs: str) -> None:
        """Tick runs in the list of an experiment, by the beginnings of their names, and press Compare."""
        self.open_mlflow(f"{self.experiment(experiment)}/runs")
        for run in runs:
            row = self.page.get_by_role("row").filter(has_text=run)
            row.get_by_role("checkbox").first.check()
        self.page.get_by_test_id("runs-compare-button").click()
        self.page.get_by_text(f"Comparing {len(runs)} Runs").first.wait_for()
