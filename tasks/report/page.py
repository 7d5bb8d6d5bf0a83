"""The report of one recipe run as a self-contained HTML page.

A section without data (the run failed earlier, or an artifact was removed) is left out. Text written by a model or from
a data set is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tasks.report import curves, svg
from tasks.report.data_sections import funnels, judges
from tasks.report.tables import paper_rows, set_sections, sizes
from tasks.tracking.names import flatten
from tasks.tracking.reader import RunReader
from tasks.tracking.recipe_run import RecipeRun
from tasks.tracking.tags import (
    ERROR_TAG,
    FAILED_TAG,
    FLOW_TAG,
    KEY_TAG,
    OVERRIDES_TAG,
    RECIPE_TAG,
    SEED_TAG,
    gate_tag,
)

ESTIMATE, MEMORY_METRIC = "estimate.json", "peak_memory_gb"
SIGNS = {"ran": "✓", "reused": "↺", "failed": "✗", "killed": "✗", "running": "…"}
_ENDED = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
    "RUNNING": "running",
    "WAITING": "waiting for an answer",
}
_PASSED = {"passed": "✓", "approved": "✓", "warned": "!", "waiting": "…"}


def render(run: RecipeRun, content: Mapping[str, Any], reader: RunReader, link: str | None = None) -> str:
    """Renders the page. `content`: "table" and "completions" from the stage report, or {}. `link`: URL of the run in
    MLflow."""
    environment = Environment(
        loader=PackageLoader("tasks.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": svg.number}
    environment.globals |= {"swatch": svg.swatch}
    table = content.get("table", {})
    return environment.get_template("report.html").render(
        run=header(run),
        link=link,
        checkpoints=list(table),
        rows=paper_rows(table),
        sizes=sizes(table),
        confidence=confidence(run),
        sets=set_sections(table),
        pipeline=pipeline(run),
        learning=learning(run, reader),
        funnels=funnels(run.manifests),
        judges=judges(run.manifests),
        gates=gates(run),
        completions=content.get("completions", []),
        estimates=estimates(run, reader),
        lineage=lineage(run),
        config=sorted(flatten(run.config)),
    )


def confidence(run: RecipeRun) -> str:
    """Confidence level of the evaluation's intervals, such as "95%"; "" if the evaluation is gone."""
    evaluation = run.manifests.get("evaluate")
    level = evaluation.config.get("confidence") if evaluation else None
    return f"{100 * level:g}%" if level else ""


def header(run: RecipeRun) -> dict[str, Any]:
    """The head of the page: the run, its recipe, times and state."""
    tags = run.run.tags
    return {
        "id": run.run.id,
        "name": run.run.name,
        "flow": tags.get(FLOW_TAG, ""),
        "recipe": tags.get(RECIPE_TAG, ""),
        "description": run.config.get("description", ""),
        "seed": tags.get(SEED_TAG, ""),
        "status": _ENDED.get(run.run.status, run.run.status.lower()),
        "began": _time(run.run.began),
        "seconds": run.run.ended - run.run.began if run.run.ended else None,
        "overrides": tags.get(OVERRIDES_TAG, ""),
        "failed": {"stage": tags[FAILED_TAG], "error": tags.get(ERROR_TAG, "")} if FAILED_TAG in tags else None,
    }


def pipeline(run: RecipeRun) -> list[dict[str, Any]]:
    """One row per stage: its status, duration, and position within the run's time, in percent."""
    end = run.run.ended or max((s.run.ended or s.run.began for s in run.stages), default=run.run.began)
    whole = max(end - run.run.began, 1e-3)
    lines = []
    for stage in run.stages:
        until = stage.run.ended or end
        lines.append(
            {
                "name": stage.name,
                "status": stage.status,
                "sign": SIGNS.get(stage.status, "?"),
                "seconds": stage.seconds,
                "left": round(100 * (stage.run.began - run.run.began) / whole, 2),
                "width": round(max(0.4, 100 * (until - stage.run.began) / whole), 2),
                "steps": stage.manifest.steps_completed if stage.manifest else None,
                "key": stage.run.tags.get(KEY_TAG, "")[:12],
                "error": stage.error,
                "stale": stage.stale,
            }
        )
    return lines


def learning(run: RecipeRun, reader: RunReader) -> list[dict[str, Any]]:
    """Curves of the training stages: first all losses together, then each reinforcement learning stage."""
    losses: list[dict[str, Any]] = []
    sections = []
    for name in dict.fromkeys(stage.name for stage in run.stages):
        stage = run.stage(name)
        assert stage is not None
        pictures = [
            {
                "title": picture.title,
                "svg": svg.curves(f"{name}: {picture.title}", series),
                "legend": [(n, label, points[-1][1]) for n, (label, points) in enumerate(series.items())],
            }
            for picture, series in curves.read(reader, stage)
        ]
        if len(pictures) == 1:
            losses.append({**pictures[0], "title": name})
        elif pictures:
            sections.append({"title": name, "reused": stage.status == "reused", "pictures": pictures})
    return ([{"title": "Losses, nats", "reused": False, "pictures": losses}] if losses else []) + sections


def gates(run: RecipeRun) -> list[dict[str, Any]]:
    """Every gate of the recipe: its outcome, and who decided what."""
    rows = []
    for gate in run.config.get("gates", []):
        tags, name = run.run.tags, gate["name"]
        status = tags.get(gate_tag(name), "not reached")
        decision = tags.get(gate_tag(name, "decision"))
        rows.append(
            {
                "name": name,
                "after": gate["after"],
                "status": status,
                "sign": _PASSED.get(status, "–" if status == "not reached" else "✗"),
                "evidence": [line for line in tags.get(gate_tag(name, "evidence"), "").split("; ") if line],
                "decision": json.loads(decision) if decision else None,
            }
        )
    return rows


def estimates(run: RecipeRun, reader: RunReader) -> dict[str, Any] | None:
    """Estimated and actual cost of each stage; None without an estimate. Memory is in GB per device, for the stage's
    largest job."""
    estimate = reader.read_json(run.run.id, ESTIMATE)
    if not estimate:
        return None
    rows = []
    for name, of in estimate["stages"].items():
        stage = run.stage(name)
        peaks = [v for metric, v in stage.maker.metrics.items() if metric.endswith(MEMORY_METRIC)] if stage else []
        rows.append(
            {
                "name": name,
                "estimated": of.get("seconds"),
                "actual": stage.seconds if stage else None,
                "memory": of.get("peak_memory_gb"),
                "actual_memory": max(peaks, default=None),
            }
        )
    return {"device": estimate.get("device", {}).get("name", ""), "rows": rows}


def lineage(run: RecipeRun) -> dict[str, Any] | None:
    """Lineage of the artifacts: arcs, and a table that also names inputs from other runs."""
    manifests = {stage: manifest for stage, manifest in run.manifests.items() if stage != "report"}  # this page itself
    place = {manifest.digest: number for number, manifest in enumerate(manifests.values())}
    if len(manifests) < 2:
        return None
    edges, rows = [], []
    for number, (stage, manifest) in enumerate(manifests.items()):
        sources = []
        for name, ref in manifest.inputs.items():
            if ref.digest in place:
                edges.append((place[ref.digest], number))
            outside = ref.path or ("" if ref.digest in place else f"{(ref.key or '')[:12]}, not of this run")
            sources.append(f"{name} ({outside})" if outside else name)
        rows.append(
            {
                "stage": stage,
                "key": manifest.key[:12],
                "digest": manifest.digest[:12],
                "created": manifest.created[:16].replace("T", " "),
                "run": (manifest.mlflow_run_id or "")[:8],
                "files": len(manifest.files),
                "size": sum(entry["size"] for entry in manifest.files.values()) / 1e6,
                "sources": sources,
            }
        )
    return {"svg": svg.arcs("What was made from what", list(manifests), sorted(set(edges))), "rows": rows}


def duration(seconds: float | None) -> str:
    """Seconds as text."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
