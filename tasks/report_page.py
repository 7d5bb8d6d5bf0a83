"""The report of one recipe run as one HTML page that needs nothing else: sections from what is known, and a template.

What a section needs may be missing (the run failed before, an artifact was removed): then the section is not there.
Everything that a model or a data set wrote is escaped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tasks import curves, data_statistics, svg
from tasks.recipe_runs import RecipeRun
from tasks.report import paper_rows
from tasks.run_names import BEFORE_TAG, DIFFERS_TAG
from tasks.store import Manifest
from tasks.tracked import ERROR_TAG, FAILED_TAG, Tracked
from tasks.tracking import flatten

ESTIMATE, MEMORY_METRIC = "estimate.json", "peak_memory_gb"
SIGNS = {"ran": "✓", "reused": "↺", "failed": "✗", "killed": "✗", "running": "…"}
_ENDED = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped", "RUNNING": "running"}
_PASSED = {"passed": "✓", "approved": "✓", "warned": "!", "waiting": "…"}


def render(run: RecipeRun, content: Mapping[str, Any], tracked: Tracked, link: str | None = None) -> str:
    """The page. `content`: "table" and "completions" as the stage report makes them, {} where there are none; `link`:
    where the run is found in MLflow."""
    environment = Environment(
        loader=PackageLoader("tasks"),
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
        sizes=_sizes(table),
        pipeline=pipeline(run),
        learning=learning(run, tracked),
        funnels=funnels(run.manifests),
        judges=judges(run.manifests),
        gates=gates(run),
        completions=content.get("completions", []),
        estimates=estimates(run, tracked),
        lineage=lineage(run),
        config=sorted(flatten(run.config)),
    )


def header(run: RecipeRun) -> dict[str, Any]:
    tags = run.run.tags
    return {
        "id": run.run.id,
        "name": run.run.name,
        "flow": tags.get("r1flow.flow", ""),
        "recipe": tags.get("r1flow.recipe", ""),
        "description": run.config.get("description", ""),
        "seed": tags.get("r1flow.seed", ""),
        "status": _ENDED.get(run.run.status, run.run.status.lower()),
        "began": _time(run.run.began),
        "seconds": run.run.ended - run.run.began if run.run.ended else None,
        "before": tags.get(BEFORE_TAG, "")[:8],
        "differs": [part for part in tags.get(DIFFERS_TAG, "").split("; ") if part],
        "failed": {"stage": tags[FAILED_TAG], "error": tags.get(ERROR_TAG, "")} if FAILED_TAG in tags else None,
    }


def pipeline(run: RecipeRun) -> list[dict[str, Any]]:
    """A line a stage: how it went, how long it took, and where it lies in the run's time, in percent of it."""
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
                "key": stage.run.tags.get("r1flow.key", "")[:12],
                "error": stage.error,
            }
        )
    return lines


def learning(run: RecipeRun, tracked: Tracked) -> list[dict[str, Any]]:
    """Pictures of the stages that trained something: losses together, then each stage of reinforcement learning."""
    losses: list[dict[str, Any]] = []
    found = []
    for name in dict.fromkeys(stage.name for stage in run.stages):
        stage = run.stage(name)
        assert stage is not None
        pictures = [
            {
                "title": picture.title,
                "svg": svg.curves(f"{name}: {picture.title}", series),
                "legend": [(n, label, points[-1][1]) for n, (label, points) in enumerate(series.items())],
            }
            for picture, series in curves.read(tracked, stage)
        ]
        if len(pictures) == 1:
            losses.append({**pictures[0], "title": name})
        elif pictures:
            found.append({"title": name, "reused": stage.status == "reused", "pictures": pictures})
    return ([{"title": "Losses", "reused": False, "pictures": losses}] if losses else []) + found


def funnels(manifests: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """What went in, what was dropped and why, what was left: of problems, demonstrations and the SFT data."""
    found = []
    if problems := manifests.get("problems"):
        found.append(_problem_funnel(problems.counts))
    if cold := manifests.get("cold_start_data"):
        counts = dict(cold.counts)
        rows = [("kept", counts.pop("kept", 0)), *sorted(counts.items(), key=lambda item: -item[1])]
        found.append(_funnel("Demonstrations of the cold start", "sampled or written", rows[1:] + rows[:1]))
    if (sft := manifests.get("sft_data")) and (sft.path / data_statistics.STATISTICS).is_file():
        statistics = data_statistics.read(sft.path)
        (_, _, *columns), (_, *rows) = data_statistics.funnel(statistics["lines"], "part")
        made = _funnel("SFT data", "sampled", [(name, total) for name, total, *_ in rows])
        made["columns"] = columns
        for row, (_, _, *values) in zip(made["rows"], rows, strict=True):
            row["values"] = values
        made["tokens"] = statistics["tokens"]["parts"]
        made["warnings"] = statistics["warnings"]
        found.append(made)
    return found


def _problem_funnel(counts: Mapping[str, int]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for name, count in counts.items():
        if name.startswith("source"):
            sums[name.partition("_")[2]] += count
    held_out = {f"held out, {d}": counts.get(f"{d}_held_out", 0) for d in ("reasoning", "general")}
    train = {f"to train on, {d}": counts.get(f"{d}_train", 0) for d in ("reasoning", "general")}
    dropped = {
        "duplicate": sums["duplicates"] + counts.get("duplicates_across_sources", 0),
        "unverifiable": sums["unverifiable"],
        "bad record": sums["bad_records"],
        "shared with the held-out": counts.get("decontamination_equal", 0)
        + counts.get("decontamination_overlapping", 0),
    }
    rest = sums["read"] - sum(dropped.values()) - sum(held_out.values()) - sum(train.values())
    rows = [(k, v) for k, v in dropped.items() if v] + ([("held out beyond the maximum", rest)] if rest > 0 else [])
    return _funnel("Problems", "read", [*rows, *held_out.items(), *train.items()])


def _funnel(title: str, whole: str, rows: Sequence[tuple[str, int]]) -> dict[str, Any]:
    total = sum(count for _, count in rows)
    return {
        "title": title,
        "whole": f"{total:,} {whole}",
        "columns": [],
        "tokens": {},
        "warnings": [],
        "rows": [
            {
                "name": name.replace("_", " "),
                "count": count,
                "share": 100 * count / total if total else 0.0,
                "kept": name == data_statistics.KEPT or name.startswith("to train on"),
                "values": [],
            }
            for name, count in rows
        ],
    }


_JUDGED = {
    "judge_agreement": "agrees with the rules on verified answers",
    "judge_undecided_share": "could not decide",
    "judge_repaired_share": "replies that had to be repaired or asked for again",
    "judge_position_bias": "pairs whose winner changed with their order",
    "judge_first_share": "first response wins",
    "judge_first_wins": "first response wins",
    "judge_orders_agree": "both orders agree",
    "judge_longer_wins": "longer response wins",
    "judge_length_correlation": "correlation of length and verdict",
    "helpful_held_out_accuracy": "helpful model: held-out pairs right",
    "helpful_held_out_calibration_error": "helpful model: calibration error",
    "safe_held_out_accuracy": "safety model: held-out labels right",
    "safe_held_out_calibration_error": "safety model: calibration error",
}
_NO_SHARES = ("correlation", "calibration_error")


def judges(manifests: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """What is known about the judge and about the models that learned from it, by stage."""
    found = []
    for stage in ("sft_data", "reward_models"):
        if stage not in manifests:
            continue
        metrics = manifests[stage].metrics
        for name, title in _JUDGED.items():
            if (value := metrics.get(name)) is not None:
                bounds = [metrics.get(f"{name}_{side}") for side in ("low", "high")]
                texts = [_share(name, bound) for bound in bounds if bound is not None]
                row = {"stage": stage, "title": title, "value": _share(name, value), "interval": " to ".join(texts)}
                found.append(row)
    return found


def _share(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith(_NO_SHARES) else f"{100 * value:.1f}%"


def gates(run: RecipeRun) -> list[dict[str, Any]]:
    """Every gate of the recipe: what it found, and who decided what."""
    found = []
    for gate in run.config.get("gates", []):
        tag = f"r1flow.gate.{gate['name']}"
        status = run.run.tags.get(tag, "not reached")
        decision = run.run.tags.get(f"{tag}.decision")
        found.append(
            {
                "name": gate["name"],
                "after": gate["after"],
                "status": status,
                "sign": _PASSED.get(status, "–" if status == "not reached" else "✗"),
                "evidence": [line for line in run.run.tags.get(f"{tag}.evidence", "").split("; ") if line],
                "decision": json.loads(decision) if decision else None,
            }
        )
    return found


def estimates(run: RecipeRun, tracked: Tracked) -> dict[str, Any] | None:
    """What each stage was estimated to take, beside what it took. None without an estimate.

    Memory is of one device, in GB; the stage's largest job counts.
    """
    estimate = tracked.read_json(run.run.id, ESTIMATE)
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
    """Which artifact was made from which: arcs, and a table that also names what came from outside of this run."""
    made = {stage: manifest for stage, manifest in run.manifests.items() if stage != "report"}  # that is this page
    place = {manifest.digest: number for number, manifest in enumerate(made.values())}
    if len(made) < 2:
        return None
    edges, rows = [], []
    for number, (stage, manifest) in enumerate(made.items()):
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
    return {"svg": svg.arcs("What was made from what", list(made), sorted(set(edges))), "rows": rows}


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _sizes(table: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(table.values()), {})
    if "problems" not in first:
        return ""
    return f"{first['problems']:,} held-out problems, {first['samples'] // max(1, first['problems'])} samples each"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
