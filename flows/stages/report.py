"""Report: the closing table, and completions of all checkpoints side by side. The report page shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.recipe.sections import Report
from flows.stage_contract.stage import Context, Outcome, Stage
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


def shown(manifest: Manifest) -> str:
    """The closing table as Markdown."""
    return markdown(json.loads(manifest.local(CONTENT).read_text())["table"])


STAGE = Stage("report", 4, ("problems", "evaluate"), build, shown=shown)
