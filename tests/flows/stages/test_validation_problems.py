"""Problems that no stage trains on and evaluation does not ask: for the validation of RL while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import hashed_config
from flows.stages import problems, r1_zero
from grpo.data.records import read_problems
from grpo.errors import InputError
from tests.support.stage_progress import progress_of

SHARE = "problems.validation_share=0.2"
FEW = [f"problems.sources.{number}.count=150" for number in range(2)]


def split(folder: Path, *overrides: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Texts of each file that the stage writes, and its counts."""
    folder.mkdir()
    progress = progress_of("problems")
    config = load_recipe("tiny", [*FEW, *overrides]).problems
    outcome = problems.build(SimpleNamespace(config=config, seed=0, out=folder, progress=progress))  # type: ignore[arg-type]
    return {path.stem: [p.text for p in read_problems(path)] for path in folder.glob("*.parquet")}, outcome.counts


def test_a_share_of_the_training_problems_is_set_apart(tmp_path: Path) -> None:
    before, _ = split(tmp_path / "without")
    after, counts = split(tmp_path / "with", SHARE)
    assert before.keys() == {"train", "held_out"} and after.keys() == {*before, "validation"}
    assert after["held_out"] == before["held_out"]  # evaluation asks what it asked
    train, validation = set(after["train"]), set(after["validation"])
    assert not train & validation and not (train | validation) & set(after["held_out"])
    # Training problems that share ten words in a row with validation problems are dropped, and counted.
    dropped = set(before["train"]) - train - validation
    assert train | validation <= set(before["train"])
    assert len(dropped) == counts["validation_equal"] + counts["validation_overlapping"] < 10
    assert 0.1 < len(validation) / len(before["train"]) < 0.3
    assert counts["reasoning_validation"] + counts["general_validation"] == len(validation)


def test_without_it_the_keys_are_those_of_earlier_versions() -> None:
    recipe = load_recipe("tiny")
    assert recipe.r1_zero is not None
    hashed = hashed_config(problems.STAGE, recipe.problems, 0) | hashed_config(r1_zero.STAGE, recipe.r1_zero, 0)
    assert not hashed.keys() & {"validation_share", "validate_every", "validation", "keep"}
    assert hashed_config(problems.STAGE, load_recipe("tiny", [SHARE]).problems, 0)["validation_share"] == 0.2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["alignment_rl.validate_every=5"], "alignment_rl.validate_every needs problems.validation_share above 0"),
        (["problems.validation_share=1"], "problems.validation_share"),
        ([SHARE, "rlhf_ppo.validate_every=5"], "no 'accuracy' here; choose from reward, helpful, safe"),
        ([SHARE, "r1_zero.keep=best"], "need validate_every"),
    ],
)
def test_bad_input_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", overrides)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_the_manifest_names_the_checkpoint_that_was_kept(r1: Any, first_run: dict[str, Any]) -> None:
    settings = [SHARE, "r1_zero.validate_every=2", "r1_zero.keep=best", "r1_zero.validation={problems=16}"]
    made = r1.tiny("run", "--flow", "r1_zero", *(part for value in settings for part in ("--set", value)))
    key = next(stage["key"] for stage in made["stages"] if stage["name"] == "r1_zero")
    manifest = json.loads((r1.home / "artifacts" / "r1_zero" / key / "1" / "manifest.json").read_text())
    assert manifest["counts"]["kept_step"] in (2, 4) and manifest["steps_completed"] == 4
    assert manifest["metrics"]["kept/accuracy"] == manifest["metrics"]["validation/accuracy"]
    assert "On validation problems" in Path(made["report"]).read_text()
