"""Report: the closing table in MLflow and as a Prefect artifact, and the whole as Markdown."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from flows.evaluate import TABLE
from flows.forms import Inputs, Seed
from flows.recipe import Report
from flows.stage import Context, Outcome, Stage, Where, run_stage
from flows.students import student_stage
from grpo.data import read_samples
from tasks.data_plots import FUNNEL, TOKENS
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
    pictures = [path for name in (FUNNEL, TOKENS) for path in _made_by(context, "sft_data", name)]
    text += "".join(f"\n![{path.stem} of the SFT data]({path.name})\n" for path in pictures)
    for path in pictures:
        shutil.copy(path, context.out / path.name)
        context.tracking.log_file(context.run_id, path, "")
    (context.out / REPORT).write_text(text)
    (context.out / ROWS).write_text(json.dumps(frame.reset_index().to_dict("records"), indent=2))
    context.tracking.log_file(context.run_id, context.out / REPORT, "")
    return Outcome(counts={"checkpoints": len(frame)})


def _made_by(context: Context, stage: str, name: str) -> list[Path]:
    """A file of an input, where this report has that input."""
    return [context.path(stage) / name] if stage in context.inputs else []


def rows(made: Manifest) -> list[dict[str, Any]]:
    """The closing table of a report in the store, as it is shown."""
    return json.loads((made.path / ROWS).read_text())


def publish_to_prefect(report: str, recipe: str) -> None:
    """Show the report in Prefect, also when every stage was reused."""
    key = re.sub("[^a-z0-9]+", "-", f"report-{recipe}".lower()).strip("-")
    create_markdown_artifact(markdown=report, key=key, description="Checkpoints, stages and completions of a run.")


STAGE = Stage(
    "report",
    3,
    ("problems", "cold_start_data", "reasoning_rl", "sft_data", "reward_models", "alignment_rl", "evaluate"),
    build,
)
ZERO_STAGE = Stage("report", 3, ("problems", "r1_zero", "evaluate"), build)
RLHF_STAGE = Stage(
    "report", 3, ("problems", "cold_start_data", "cold_start_sft", "reward_models", "rlhf_ppo", "evaluate"), build
)


def distill_stage(students: Sequence[str]) -> Stage:
    """The report about these students."""
    taught = [student_stage(name).name for name in students]
    return Stage(
        "report",
        3,
        ("problems", "cold_start_data", "reasoning_rl", "sft_data", *taught, "evaluate"),
        build,
        mixed=True,
    )


@flow(name=STAGE.name)
def report(config: Report, inputs: Inputs = None, seed: Seed = 0, where: Where | None = None) -> State:
    """Write the report of an R1 run."""
    return run_stage(STAGE, config, inputs or {}, seed, where or Where())


@flow(name=f"{STAGE.name}-zero")
def report_zero(config: Report, inputs: Inputs = None, seed: Seed = 0, where: Where | None = None) -> State:
    """Write the report of an R1-Zero run."""
    return run_stage(ZERO_STAGE, config, inputs or {}, seed, where or Where())


@flow(name=f"{STAGE.name}-rlhf")
def report_rlhf(config: Report, inputs: Inputs = None, seed: Seed = 0, where: Where | None = None) -> State:
    """Write the report of an RLHF run."""
    return run_stage(RLHF_STAGE, config, inputs or {}, seed, where or Where())


@flow(name=f"{STAGE.name}-distill")
def report_distill(
    config: Report,
    students: list[str],
    inputs: Inputs = None,
    seed: Seed = 0,
    where: Where | None = None,
) -> State:
    """Write the report of a distillation."""
    return run_stage(distill_stage(students), config, inputs or {}, seed, where or Where())
