"""Report: the closing table in MLflow and as a Prefect artifact, and the whole as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from flows.evaluate import TABLE
from flows.recipe import Report
from flows.stage import Context, Outcome, Stage, Where, run_stage
from grpo.data import read_samples
from tasks.report import closing_frame, markdown
from tasks.store import Manifest

REPORT, ROWS = "report.md", "checkpoints.json"


def build(context: Context) -> Outcome:
    config: Report = context.config
    evaluated = context.path("evaluate")
    table = json.loads((evaluated / TABLE).read_text())
    frame = closing_frame(table)
    samples = {name: read_samples(evaluated / "samples" / name) for name in table}
    stages = {name: item.manifest for name, item in context.inputs.items() if item.manifest is not None}
    text = markdown(frame, stages, samples, config.samples)
    (context.out / REPORT).write_text(text)
    (context.out / ROWS).write_text(json.dumps(frame.reset_index().to_dict("records"), indent=2))
    context.tracking.log_file(context.run_id, context.out / REPORT, "")
    return Outcome(counts={"checkpoints": len(frame)})


def rows(made: Manifest) -> list[dict[str, Any]]:
    """The closing table of a report in the store, as it is shown."""
    return json.loads((made.path / ROWS).read_text())


def publish_to_prefect(report: str, recipe: str) -> None:
    """Show the report in Prefect, also when every stage was reused."""
    key = re.sub("[^a-z0-9]+", "-", f"report-{recipe}".lower()).strip("-")
    create_markdown_artifact(markdown=report, key=key, description="Checkpoints, stages and completions of a run.")


STAGE = Stage(
    "report",
    1,
    ("problems", "cold_start_data", "reasoning_rl", "sft_data", "reward_models", "alignment_rl", "evaluate"),
    build,
)
ZERO_STAGE = Stage("report", 1, ("problems", "r1_zero", "evaluate"), build)


@flow(name=STAGE.name)
def report(config: Report, inputs: Mapping[str, str] | None = None, seed: int = 0, where: Where | None = None) -> State:
    """Write the report of an R1 run."""
    return run_stage(STAGE, config, inputs or {}, seed, where or Where())


@flow(name=f"{STAGE.name}-zero")
def report_zero(
    config: Report, inputs: Mapping[str, str] | None = None, seed: int = 0, where: Where | None = None
) -> State:
    """Write the report of an R1-Zero run."""
    return run_stage(ZERO_STAGE, config, inputs or {}, seed, where or Where())
