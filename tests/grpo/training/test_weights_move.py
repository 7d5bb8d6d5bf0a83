"""The shipped recipes' number formats at R1's learning rates: weights move as float32's do, and bfloat16's do not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from flows.recipe.load import load_recipe, shipped
from flows.recipe.schema import Recipe
from grpo.config.common import Hardware, Optimizer
from grpo.config.jobs import SFTJob
from grpo.config.rl import RL
from grpo.config.supervised import SFT, ProcessRewardModel, RewardModel, Supervised
from grpo.errors import InputError
from grpo.training.sft import train_sft

STEPS = {"learning_rate": 1e-6}
FLOAT32 = Hardware(device="cpu")
BFLOAT16 = Hardware(device="cpu", dtype="bfloat16")
LOOP = SFT(batch_size=8, micro_batch_tokens=512, max_tokens=64, epochs=10, max_steps=30, optimizer=STEPS)


def trained(recipe: Recipe) -> list[Supervised | RL]:
    """The sections of a recipe that train a model which exists already."""
    sections = [getattr(recipe, name) for name in type(recipe).model_fields]
    students = [student.sft for student in recipe.distill.students] if recipe.distill else []
    sections += [recipe.reward_models.helpful, recipe.reward_models.safe, *students]
    return [section for section in sections if isinstance(section, (Supervised, RL))]


@cache
def formats() -> list[tuple[Hardware, Optimizer]]:
    """What decides how numbers are kept, of all sections in all shipped recipes, for one process on a CPU."""
    sections = [section for name in shipped() for section in trained(load_recipe(name))]
    here = {"device": "cpu", "processes": 1, "nodes": 1}
    found = {
        (section.hardware.model_copy(update=here).model_dump_json(), section.optimizer.kind) for section in sections
    }
    return [(Hardware.model_validate_json(kept), Optimizer(kind=kind, **STEPS)) for kept, kind in sorted(found)]


@pytest.fixture(scope="module")
def start(sft_fields, tmp_path_factory) -> dict[str, Any]:
    """A model before any training, whose weights are as large as those of published ones: 0.02."""
    folder = tmp_path_factory.mktemp("untrained")
    torch.manual_seed(0)
    LlamaForCausalLM(AutoConfig.from_pretrained(sft_fields["model"])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_fields["model"]).save_pretrained(folder)
    return {"model": str(folder), "data": sft_fields["data"]}


def movement(start: dict[str, Any], folder: Path, hardware: Hardware, optimizer: Optimizer) -> torch.Tensor:
    """By how much 30 steps move each weight."""
    fields: dict[str, Any] = {"out": folder / "out", "state": folder / "state"}
    for place in fields.values():
        place.mkdir(parents=True)
    fields |= {"metrics": folder / "metrics.jsonl", "result": folder / "result.json", **start}
    job = SFTJob(**fields, seed=0, settings=LOOP)
    # Unchecked, so that what is refused can be measured, too.
    settings = LOOP.model_copy(update={"hardware": hardware, "optimizer": optimizer})
    train_sft(job.model_copy(update={"settings": settings}))
    before, after = load_file(Path(start["model"]) / "model.safetensors"), load_file(folder / "out/model.safetensors")
    first = {name: tensor.to(after[name].dtype).double() for name, tensor in before.items()}
    return torch.cat([(after[name].double() - first[name]).flatten() for name in sorted(first)])


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory) -> torch.Tensor:
    return movement(start, tmp_path_factory.mktemp("float32"), FLOAT32, Optimizer(**STEPS))


def share(moved: torch.Tensor, expected: torch.Tensor) -> float:
    """The part of the expected movement that took place: its projection, by which noise in other directions does not
    count."""
    return (moved @ expected / (expected @ expected)).item()


@pytest.mark.system
@pytest.mark.parametrize(("hardware", "optimizer"), formats(), ids=lambda of: getattr(of, "kind", None) or of.dtype)
def test_with_shipped_settings_weights_move_as_in_float32(start, expected, tmp_path, hardware, optimizer):
    # 30 steps of AdamW at 1e-6: no weight moves further than about 3e-5, and with a steady gradient each does.
    assert 1e-5 < expected.abs().max() < 3.5e-5
    assert 0.95 < share(movement(start, tmp_path, hardware, optimizer), expected) < 1.05


@pytest.mark.system
def test_weights_in_plain_bfloat16_do_not(start, expected, tmp_path):
    assert share(movement(start, tmp_path, BFLOAT16, Optimizer(**STEPS)), expected) < 0.1


def test_shipped_settings_include_mixed_precision():
    assert any(hardware.mixed_precision for hardware, _ in formats())


# 0.02 / 256 = 7.8125e-5.
@pytest.mark.parametrize(("rate", "refused"), [(1e-6, True), (5e-5, True), (7.8e-5, True), (7.82e-5, False)])
def test_what_bfloat16_cannot_hold_is_refused(rate, refused):
    settings = {"optimizer": {"learning_rate": rate}, "hardware": {"dtype": "bfloat16"}}
    if refused:
        with pytest.raises(
            ValidationError, match=f"rate of {rate:g} hardly moves .* set hardware.mixed_precision = true"
        ):
            SFT(**settings)
    else:
        assert SFT(**settings).optimizer.learning_rate == rate


@pytest.mark.parametrize(
    "fields",
    [{"hardware": {"dtype": "bfloat16", "mixed_precision": True}}, {"hardware": {"dtype": "bfloat16"}, "lora": {}}, {}],
    ids=["mixed", "adapters", "float32"],
)
def test_what_keeps_float32_weights_takes_any_rate(fields):
    assert SFT(optimizer=STEPS, **fields) and RL(steps=1, sampling={"max_new_tokens": 9}, optimizer=STEPS, **fields)


@pytest.mark.parametrize("kind", [RewardModel, ProcessRewardModel])
def test_reward_models_have_no_adapters(kind):
    """They were ignored, and the rate was not checked."""
    with pytest.raises(ValidationError, match=r"lora\n.* reward models train all weights"):
        kind(optimizer=STEPS, lora={"rank": 8})
    with pytest.raises(ValidationError, match="hardly moves"):
        kind(optimizer=STEPS, hardware={"dtype": "bfloat16"})
    recorded = kind(optimizer=STEPS).model_dump(mode="json")
    assert recorded["lora"] is None and kind.model_validate(recorded) == kind(optimizer=STEPS)
    assert "lora" not in kind.model_json_schema()["properties"]


def test_a_value_models_own_rate_is_checked():
    fields = {"steps": 1, "sampling": {"max_new_tokens": 9}, "hardware": {"dtype": "bfloat16"}, "method": "ppo"}
    with pytest.raises(ValidationError, match="rate of 1e-06"):
        RL(**fields, optimizer={"learning_rate": 0.01}, ppo={"value_learning_rate": 1e-6})


def test_a_recipe_says_which_section():
    with pytest.raises(InputError) as error:
        load_recipe("qwen2.5-1.5b", ["reasoning_rl.hardware.mixed_precision=false"])
    assert "reasoning_rl: a learning rate of 1e-06 hardly moves bfloat16 weights" in str(error.value)
    assert "\n" not in str(error.value)
