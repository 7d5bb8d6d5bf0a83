"""Report: the closing table, and completions of all checkpoints side by side. The report page shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.states import State

from flows.prefect_server import keeps_runs
from flows.recipe.forms import Inputs, Seed
from flows.recipe.sections import Report
from flows.stage_contract.run_page import artifact_key
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import Context, Outcome, RunContext, Stage
from flows.stage_contract.stage_flow import stage_flow
from flows.stages.problems import HELD_OUT
from grpo.data.records import Problem, read_rows
from tasks.evaluation.records import SAMPLES, TABLE
from tasks.report.tables import completions, markdown
from tasks.store.manifest import Manifest

CONTENT = "report.json"


def build(context: Context) -> Outcome:
    """Writes the content of the report page."""
    config: Report = context.config
    report = content(context.path("evaluate"), context.path("problems"), config.samples)
    (context.out / CONTENT).write_text(json.dumps(report, indent=2, ensure_ascii=False))
    return Outcome(counts={"checkpoints": len(report["table"])})


def content(evaluated: Path, problems: Path | None, shown: int) -> dict[str, Any]:
    """Content of the report from an evaluation and its problems: {"table": ..., "completions": ...}. Without the
    problems, there are no completions."""
    table = json.loads((evaluated / TABLE).read_text())
    samples = {name: evaluated / SAMPLES / name for name in table}
    asked_problems = read_rows(problems / HELD_OUT, Problem) if problems else ()
    return {"table": table, "completions": completions(asked_problems, samples, shown)}


def publish_to_prefect(recipe: str, table: Mapping[str, Mapping[str, Any]], link: str | None) -> None:
    """Shows the closing table in Prefect and links the report page, even if every stage was reused. Without a permanent
    server, nothing is sent."""
    if not keeps_runs():
        return
    key = artifact_key(recipe)
    if table:
        create_markdown_artifact(
            markdown=markdown(table), key=f"report-{key}", description="Every checkpoint of a run."
        )
    if link:
        create_link_artifact(
            link=link, link_text="The report of this run", key=f"report-page-{key}", description="One HTML page."
        )


def shown(manifest: Manifest) -> str:
    """The closing table as Markdown."""
    return markdown(json.loads(manifest.local(CONTENT).read_text())["table"])


STAGE = Stage("report", 4, ("problems", "evaluate"), build, shown=shown)


@stage_flow(STAGE.name)
def report(config: Report, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Write the report of an evaluation."""
    return run_stage(STAGE, config, inputs or {}, seed, where or RunContext())
