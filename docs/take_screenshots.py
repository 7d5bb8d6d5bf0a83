"""Pictures of MLflow's and Prefect's pages and of the report after a run of `tiny`, in a real browser and checked.

    pip install playwright; python docs/take_screenshots.py [--chromium /usr/bin/chromium] [--output docs/images]

It starts `r1 ui` on free ports, opens the newest recipe run, and fails if what should be on a page is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mlflow import MlflowClient
from playwright.sync_api import Page, TimeoutError, sync_playwright

from flows.report_page import default_path

STAGES = ("problems", "base", "cold_start_data", "cold_start_sft", "reasoning_rl", "sft_data", "sft", "reward_models")
STAGES += ("alignment_rl", "evaluate", "report")
UNFOLD = "[role=gridcell] button:left-of(:text('train_r1 seed'))"
"""The sign beside a recipe run that shows its stages."""
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def interfaces() -> Iterator[tuple[str, str]]:
    """`r1 ui` while the block runs: (Prefect's address, MLflow's address)."""
    prefect, mlflow = free_port(), free_port()
    command = [sys.executable, "-m", "flows.cli", "ui", "--prefect-port", str(prefect), "--mlflow-port", str(mlflow)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert "MLflow" in lines[1], "r1 ui did not start"
        yield f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def take(page: Page, url: str, path: Path, *expected: str, click: str = "", search: str = "") -> None:
    """Open a page, click and search as told, wait until every expected text is on it, keep a picture."""
    page.goto(url)
    with contextlib.suppress(TimeoutError):  # MLflow's assistant, where this version opens it
        page.get_by_text("MLflow Assistant").first.wait_for(timeout=5000)
        page.locator('button:right-of(:text-is("Beta"))').nth(2).click(timeout=5000)
    if click:
        page.locator(click).first.click()
    if search:
        page.get_by_placeholder("Search metric charts").fill(search)
    try:
        for text in expected:
            page.get_by_text(text).first.wait_for(timeout=60_000)
    except TimeoutError as error:
        page.screenshot(path=path)
        raise SystemExit(f"{url}: {error.message.splitlines()[-1].strip()}; what was there instead: {path}") from None
    page.wait_for_timeout(2500)  # charts are drawn after the text is there
    page.screenshot(path=path)
    print(path, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "images")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    with interfaces() as (prefect, mlflow), sync_playwright() as playwright:
        client = MlflowClient(mlflow)
        experiment = client.get_experiment_by_name("tiny")
        assert experiment is not None, "run `r1 run tiny` first"
        runs = client.search_runs([experiment.experiment_id], "attributes.status = 'FINISHED'", max_results=1000)
        finished = [r for r in runs if r.data.tags.get("r1flow.status") == "ran"]
        newest = {stage: next(r for r in finished if r.data.tags["r1flow.stage"] == stage) for stage in STAGES}
        parent = newest["reasoning_rl"].data.tags["mlflow.parentRunId"]
        browser = playwright.chromium.launch(executable_path=given.chromium, args=QUIET)
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        home = f"{mlflow}/#/experiments/{experiment.experiment_id}"
        rl = newest["reasoning_rl"].info.run_id
        take(page, f"{home}/runs", given.output / "mlflow-runs.png", *STAGES, click=UNFOLD)
        take(page, f"{home}/runs/{parent}", given.output / "mlflow-recipe-run.png", "train_r1 seed")
        curves = given.output / "mlflow-reasoning-rl.png"
        take(
            page, f"{home}/runs/{rl}/model-metrics", curves, "reward_accuracy", search="^reward|^kl|^completion_tokens"
        )
        take(page, f"{home}/runs/{rl}", given.output / "mlflow-lineage.png", "problems", "dev1", "dev2")
        take(page, f"{home}/models", given.output / "mlflow-models.png", "dev1", "dev2", "dev3", "r1")
        take(page, default_path(parent).as_uri(), given.output / "report.png", "Checkpoints", "Pipeline")
        take(page, f"{prefect}/runs", given.output / "prefect-runs.png", "train-r1")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
