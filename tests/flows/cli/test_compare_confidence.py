"""The confidence level of `r1 compare`, without a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli import compare
from grpo.data.records import Sample
from tasks.tracking.tags import RECIPE_TAG


def recipe_run(key: str, confidence: float) -> Any:
    run = SimpleNamespace(
        id=key * 8, name=key, tags={RECIPE_TAG: "tiny"}, status="FINISHED", began=0.0, ended=1.0, label=key
    )
    evaluation = SimpleNamespace(
        key=key, digest=key, inputs={}, local=lambda: Path(key), config={"confidence": confidence}
    )
    return SimpleNamespace(run=run, config={}, manifests={"evaluate": evaluation}, label=key)


def test_it_is_that_of_the_first_runs_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    right = {"a": [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]}
    of_metric = {key: {"pass@1": {str(n): value for n, value in enumerate(row)}} for key, row in right.items()}
    tables = {key: {"r1": {"pass@1": sum(row) / len(row)}} for key, row in right.items()}
    monkeypatch.setattr("tasks.report.compare.read_scores", lambda path: {"r1": path.name})
    monkeypatch.setattr("tasks.report.compare.read_samples", lambda path: list[Sample]())
    monkeypatch.setattr("tasks.report.compare.by_metric", lambda samples, key: of_metric[key])
    monkeypatch.setattr("tasks.report.compare.stages", lambda runs: [])
    monkeypatch.setattr(compare, "store", lambda: SimpleNamespace(check=lambda manifest: manifest))
    monkeypatch.setattr("flows.stages.evaluate.read_table", lambda manifest: tables[manifest.key])
    widths = {}
    for level in (0.5, 0.95):
        result = compare.compare([recipe_run("a", level), recipe_run("b", 0.99)])
        assert result["confidence"] == level
        ((difference,),) = [row["differences"] for row in result["metrics"]]
        assert difference["value"] == 0.25
        widths[level] = difference["high"] - difference["low"]
        compare.show(result | {"plot": None})
        assert f"differences with {100 * level:g}% bootstrap intervals" in capsys.readouterr().out
    assert widths[0.5] == 0.25 and widths[0.95] == 0.625
