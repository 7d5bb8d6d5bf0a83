"""A process reward model in a recipe: its folder enters the stage's key by what is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.references import external
from flows.stage_contract.stage import hashed_config
from flows.stages import alignment_rl, r1_zero, reasoning_rl


@pytest.mark.parametrize("stage", [reasoning_rl.STAGE, alignment_rl.STAGE, r1_zero.STAGE])
def test_a_model_of_steps_is_hashed_by_its_contents(stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, content in zip(folders, ("a", "a", "b"), strict=True):
        folder.mkdir()
        (folder / "model.safetensors").write_text(content)

    def config(folder: Path):
        changes = [f"{stage.name}.supervision=process", f"{stage.name}.step_reward={folder}"]
        return getattr(load_recipe("tiny", changes), stage.name)

    one, same, other = (hashed_config(stage, config(folder), 0) for folder in folders)
    assert one == same == other and one["step_reward"] == "input:step_reward"
    digests = [external(stage.files(config(folder))["step_reward"]).ref.digest for folder in folders]
    assert digests[0] == digests[1] != digests[2]


def test_a_rule_is_hashed_by_its_name() -> None:
    config = load_recipe("tiny", ["reasoning_rl.supervision=process"]).reasoning_rl
    assert reasoning_rl.STAGE.files(config) == {}
    assert hashed_config(reasoning_rl.STAGE, config, 0)["step_reward"] == "equations"
