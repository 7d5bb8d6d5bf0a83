"""The closing table and the report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from grpo.data import Sample
from tasks.store import Manifest

COLUMNS = {
    "pass@1": "pass@1",
    "pass@1_ci95": "95% interval",
    "cons@k": "cons@k",
    "format": "format",
    "language": "language",
    "mean_tokens": "tokens",
    "alignment": "alignment",
    "alignment_ci95": "alignment interval",
    "win_rate_dev3": "win rate over dev3",
    "win_rate_dev3_lc": "at equal length",
    "refusal": "refuses harmful",
    "over_refusal": "look-alikes",
    "refused_harmless": "harmless",
    "instructions": "instructions",
    "win_rate_dev1": "win rate over dev1",
    "win_rate_dev1_lc": "at equal length",
}


def closing_frame(table: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a checkpoint; shares in percent, as papers print them."""
    rows = {}
    for name, metrics in table.items():
        rows[name] = {title: _cell(key, metrics[key]) for key, title in COLUMNS.items() if key in metrics}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("checkpoint")


def _cell(key: str, value: Any) -> str:
    percent = 1 if key in ("mean_tokens", "alignment", "alignment_ci95") else 100
    if isinstance(value, list):
        return f"{value[0] * percent:.{2 - (percent > 1)}f}-{value[1] * percent:.{2 - (percent > 1)}f}"
    return f"{value * percent:.{2 if key == 'alignment' else 1}f}"


def markdown(
    frame: pd.DataFrame, stages: Mapping[str, Manifest], samples: Mapping[str, Sequence[Sample]], shown: int
) -> str:
    """The report: the closing table, what each stage did, and completions of one problem by every checkpoint."""
    lines = ["# Report", "", "## Checkpoints", "", _table(frame.reset_index()), "", "## Stages", ""]
    work = pd.DataFrame(
        {
            "stage": name,
            "key": manifest.key[:12],
            "seconds": round(manifest.seconds),
            "steps": manifest.steps_completed or "",
            "counts": ", ".join(f"{k} {v}" for k, v in manifest.counts.items()),
        }
        for name, manifest in stages.items()
    )
    lines += [_table(work), "", "## Completions", ""]
    for name, rows in samples.items():
        lines += [f"### {name}", ""]
        for sample in rows[:shown]:
            lines += ["```text", sample.completion.strip().replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _table(frame: pd.DataFrame) -> str:
    head = "| " + " | ".join(map(str, frame.columns)) + " |"
    rule = "|" + "---|" * len(frame.columns)
    body = [
        "| " + " | ".join("" if pd.isna(v) else str(v) for v in row) + " |" for row in frame.itertuples(index=False)
    ]
    return "\n".join([head, rule, *body])
