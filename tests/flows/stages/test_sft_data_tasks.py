"""Names of the Prefect tasks that filter the SFT data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import Context, RunContext
from flows.stages import sft_data
from grpo.config.judge import JudgeSettings


class Task:
    """Stands for a Prefect task and keeps the names of its runs."""

    names: list[str]

    def __init__(self, **options: Any):
        self.named = options.get("task_run_name")

    def __call__(self, function: Any) -> Any:
        self.function = function
        return self

    def with_options(self, task_run_name: Any) -> Any:
        assert callable(task_run_name), "Prefect would fill in the braces of a string"
        self.names.append(task_run_name())
        return self.function


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("tiny seed 3 · sft_data.filters={}", "tiny seed 3 · sft_data.filters={}"),
        (None, "seed 3"),  # outside of a recipe's run
    ],
)
def test_they_name_stage_shard_source_recipe_and_seed(
    label: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Task.names = []
    monkeypatch.setattr(sft_data, "task", Task)
    monkeypatch.setattr(sft_data, "select_shard", lambda *_: {})
    monkeypatch.setattr(sft_data, "_filter_arguments", lambda *_: ())
    judge = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    config = load_recipe("tiny").sft_data.model_copy(update={"judge": JudgeSettings.model_validate(judge)})
    inputs: Any = {name: SimpleNamespace(path=tmp_path) for name in ("problems", sft_data.POLICY)}
    attempt: Any = SimpleNamespace(state=tmp_path)
    unused: Any = None
    where = RunContext(label=label)
    context = Context(sft_data.STAGE, config, 3, inputs, attempt, where, unused, "", unused, unused)
    shards: Any = [SimpleNamespace(source="gsm8k"), SimpleNamespace(source="code")]
    paths, _ = sft_data._select(context, shards, tmp_path)
    assert Task.names == [f"sft_data: filter 0 gsm8k, {shown}", f"sft_data: filter 1 code, {shown}"]
    assert [path.name for path in paths] == ["00000.parquet", "00001.parquet"]
    assert context.name_task("trainer")() == f"sft_data: trainer, {shown}"
