"""The report of a recipe run as one HTML page, written when a run ends and by `r1 report RUN`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.home import REPORTS, home, report_address, store
from flows.prefect_server import keeps_runs
from flows.progress import Progress
from flows.stage_contract.run_page import artifact_key
from flows.stages import evaluate
from flows.stages.report import CONTENT, content
from tasks.report.tables import markdown, read_content
from tasks.store.whole_file import write_whole
from tasks.tracking.client import Tracking
from tasks.tracking.recipe_run import RecipeRun, load_run
from tasks.tracking.tags import RECIPE_TAG

logger = logging.getLogger(__name__)

PAGE = "report.html"


def page_of(record: Tracking, run: RecipeRun) -> str:
    """The HTML page of a run that has ended, with whatever it produced."""
    from tasks.report.page import render

    if data := run.manifests.get("sft_data"):
        store().check_here(data)  # the page reads its statistics
    return render(run, _content(run), record.reader, record.page(run.run.id))


def _content(run: RecipeRun) -> Mapping[str, Any]:
    """The closing table and completions, from the stage report, or from an evaluation if there is no report."""
    manifests = run.manifests
    if "report" in manifests and CONTENT in manifests["report"].files:
        return read_content(store().check(manifests["report"]).local(CONTENT))
    if "evaluate" not in manifests:
        return {}
    problems = manifests.get("problems") or store().find(manifests["evaluate"].inputs["problems"].key or "")
    for read in (manifests["evaluate"], problems):
        if read is not None:
            store().check(read)
    shown = run.config.get("report", {}).get("samples", 0)
    return content(manifests["evaluate"].local(), problems.local() if problems else None, shown)


def publish(record: Tracking, run_id: str) -> Path | None:
    """Writes the page of a recipe run that has just ended, attaches it to its MLflow run and links it in Prefect.

    A failure of the report does not fail the run: it logs a warning, and `r1 report` can write the page later.
    """
    path = None
    try:
        run = record.reader.run(run_id)
        assert run is not None, f"MLflow lost run {run_id}"
        loaded = load_run(record.reader, store(), run)
        path = write(record, loaded, default_path(run_id))
        link = _address(record, run_id, path)
        table = evaluate.read_table(loaded.manifests["evaluate"]) if "evaluate" in loaded.manifests else {}
        _publish_to_prefect(loaded.run.tags[RECIPE_TAG], table, link)
        Progress.current().tell(f"report: {link or path}")
    except Exception as error:  # errors of Prefect, MLflow, and artifacts of any version
        logger.warning("the report of run %s: %s; `r1 report %s` makes it", run_id[:8], error, run_id[:8])
    return path


def _publish_to_prefect(recipe: str, table: Mapping[str, Mapping[str, Any]], link: str | None) -> None:
    """Shows the closing table in Prefect and links the report page, even if every stage was reused. Without a permanent
    server, nothing is sent."""
    if not keeps_runs():
        return
    from prefect.artifacts import create_link_artifact, create_markdown_artifact

    key = artifact_key(recipe)
    if table:
        create_markdown_artifact(
            markdown=markdown(table), key=f"report-{key}", description="Every checkpoint of a run."
        )
    if link:
        create_link_artifact(
            link=link, link_text="The report of this run", key=f"report-page-{key}", description="One HTML page."
        )


def _address(record: Tracking, run_id: str, path: Path) -> str | None:
    """URL of the page for a browser: on this home's Prefect server if the run reports to it, else in MLflow. Browsers
    do not open local files that a server's page links to."""
    shown = report_address(path.name)
    if shown is not None and keeps_runs():
        from prefect.settings import PREFECT_API_URL

        if shown.startswith(PREFECT_API_URL.value().removesuffix("api")):
            return shown
    return record.page(run_id, PAGE)


def write(record: Tracking, run: RecipeRun, path: Path) -> Path:
    """Writes the page to `path` and attaches it to the run in MLflow."""
    text = page_of(record, run)
    write_whole(path, text)
    record.log_text(run.run.id, text, PAGE)
    return path


def default_path(run_id: str) -> Path:
    """Path of a run's report page, unless --out gives another file."""
    return home() / REPORTS / f"{run_id[:12]}.html"
