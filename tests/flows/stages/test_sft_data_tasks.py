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
from tests.support.stage_progress import progress_of


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
    names: list[str] = []

    def run_numbered(function: Any, name: str, run_names: Any, at_once: int, on_progress: Any) -> list[Any]:
        names.extend(run_name() for run_name in run_names)  # functions: Prefect would fill in the braces of strings
        return [function(number) for number in range(len(names))]

    monkeypatch.setattr(sft_data, "run_numbered", run_numbered)
    monkeypatch.setattr(sft_data, "select_shard", lambda *_: {})
    monkeypatch.setattr(sft_data, "_filter_arguments", lambda *_: ())
    judge = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    config = load_recipe("tiny").sft_data.model_copy(update={"judge": JudgeSettings.model_validate(judge)})
    inputs: Any = {name: SimpleNamespace(path=tmp_path) for name in ("problems", sft_data.POLICY)}
    attempt: Any = SimpleNamespace(state=tmp_path)
    unused: Any = None
    where = RunContext(label=label)
    context = Context(sft_data.STAGE, config, 3, inputs, attempt, where, unused, "", progress_of("sft_data"))
    shards: Any = [SimpleNamespace(source="gsm8k"), SimpleNamespace(source="code")]
    paths, _ = sft_data._select(context, shards, tmp_path)
    assert names == [f"sft_data: filter 0 gsm8k, {shown}", f"sft_data: filter 1 code, {shown}"]
    assert [path.name for path in paths] == ["00000.parquet", "00001.parquet"]
    assert context.name_task("trainer")() == f"sft_data: trainer, {shown}"
