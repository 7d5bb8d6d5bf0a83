"""Report: the closing table, and completions of all checkpoints side by side. The report's page shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.states import State

from flows.evaluate import TABLE
from flows.problems import HELD_OUT
from flows.recipe import Report
from flows.stage import Context, Outcome, Stage, Where, run_stage
from flows.students import student_stage
from grpo.data import Problem, read_rows
from tasks.report import closing_frame, completions, markdown

CONTENT = "report.json"


def build(context: Context) -> Outcome:
    config: Report = context.config
    made = content(context.path("evaluate"), context.path("problems"), config.samples)
    (context.out / CONTENT).write_text(json.dumps(made, indent=2, ensure_ascii=False))
    return Outcome(counts={"checkpoints": len(made["table"])})


def content(evaluated: Path, problems: Path | None, shown: int) -> dict[str, Any]:
    """What an evaluation found, out of its artifact and the problems': {"table": ..., "completions": ...}. Without the
    problems nobody can say what the completions answer."""
    table = json.loads((evaluated / TABLE).read_text())
    samples = {name: evaluated / "samples" / name for name in table}
    asked = read_rows(problems / HELD_OUT, Problem) if problems else ()
    return {"table": table, "completions": completions(asked, samples, shown)}


def publish_to_prefect(recipe: str, table: Mapping[str, Mapping[str, Any]], link: str | None) -> None:
    """Show the closing table in Prefect and link the report's page, also when every stage was reused."""
    key = re.sub("[^a-z0-9]+", "-", recipe.lower()).strip("-")
    if table:
        text = markdown(closing_frame(table))
        create_markdown_artifact(markdown=text, key=f"report-{key}", description="Every checkpoint of a run.")
    if link:
        create_link_artifact(
            link=link, link_text="The report of this run", key=f"report-page-{key}", description="One HTML page."
        )


STAGE = Stage(
    "report",
    4,
    ("problems", "cold_start_data", "reasoning_rl", "sft_data", "reward_models", "alignment_rl", "evaluate"),
    build,
)
ZERO_STAGE = Stage("report", 4, ("problems", "r1_zero", "evaluate"), build)
RLHF_STAGE = Stage(
    "report", 4, ("problems", "cold_start_data", "cold_start_sft", "reward_models", "rlhf_ppo", "evaluate"), build
)


def distill_stage(students: Sequence[str]) -> Stage:
    """The report about these students."""
    taught = [student_stage(name).name for name in students]
    return Stage(
        "report",
        4,
        ("problems", "cold_start_data", "reasoning_rl", "sft_data", *taught, "evaluate"),
        build,
        mixed=True,
    )


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


@flow(name=f"{STAGE.name}-rlhf")
def report_rlhf(
    config: Report, inputs: Mapping[str, str] | None = None, seed: int = 0, where: Where | None = None
) -> State:
    """Write the report of an RLHF run."""
    return run_stage(RLHF_STAGE, config, inputs or {}, seed, where or Where())


@flow(name=f"{STAGE.name}-distill")
def report_distill(
    config: Report,
    students: list[str],
    inputs: Mapping[str, str] | None = None,
    seed: int = 0,
    where: Where | None = None,
) -> State:
    """Write the report of a distillation."""
    return run_stage(distill_stage(students), config, inputs or {}, seed, where or Where())
