"""`r1 plan --estimate` on shipped recipes: what it says, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flows.cli.plan_estimate import assumptions_of, make
from flows.recipe.load import load_recipe, shipped
from flows.run.estimate import for_record
from flows.stage_graphs import GRAPHS
from grpo.errors import InputError
from grpo.generation.vllm.request import check

# Sizes as in config.json of Qwen2.5-1.5B on the Hugging Face hub.
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def arguments(
    home: Path, recipe: str, device: str | None, *assume: str, overrides: tuple[str, ...] = ()
) -> argparse.Namespace:
    config = home / "config.json"
    return argparse.Namespace(
        recipe=recipe, overrides=[*overrides], seed=None, device=device, config=config, assume=assume, calibrate=False
    )


def estimated(asked: argparse.Namespace, flow: str = "r1") -> dict[str, Any]:
    recipe = load_recipe(asked.recipe, asked.overrides)
    return make(asked, GRAPHS[flow](recipe), recipe)


def test_every_stage_of_a_recipe_has_its_numbers(home: Path) -> None:
    made = estimated(arguments(home, "qwen2.5-1.5b", "H100"))
    stages = made["stages"]
    without = [name for name, of in stages.items() if "peak_memory_gb" not in of]
    assert without == ["problems", "cold_start_data", "report"]
    assert all(of["seconds"] > (0 if name in without else 3) for name, of in stages.items())
    total = sum(of["device_hours"] for of in stages.values())
    assert made["total"]["device_hours"] == pytest.approx(total)
    # 1.54 B weights: from the hub in 2 bytes each and kept so; trained ones in 4 (mixed precision).
    assert stages["base"]["network_gb"] == pytest.approx(3.09, abs=0.01)
    assert stages["base"]["disk_gb"] == pytest.approx(3.09, abs=0.01)
    assert stages["reasoning_rl"]["disk_gb"] == pytest.approx(6.17, abs=0.01)
    # The alignment's reward models: two of 3.09 GB more than reasoning.
    held = stages["alignment_rl"]["peak_memory_gb"] - stages["reasoning_rl"]["peak_memory_gb"]
    assert held == pytest.approx(6.17, abs=0.02)
    slower = estimated(arguments(home, "qwen2.5-1.5b", "A100"))["total"]["seconds"]
    assert slower > made["total"]["seconds"]


@pytest.mark.parametrize("flow", ["r1_zero", "distill", "rlhf_ppo", "dev1", "process_supervision"])
def test_the_other_flows_have_estimates_too(home: Path, flow: str) -> None:
    stages = estimated(arguments(home, "tiny", "cpu"), flow)["stages"]
    assert set(stages) == {step.name for step in GRAPHS[flow](load_recipe("tiny"))}
    if flow == "distill":  # a student of its own shape
        assert stages["base_smallest"]["disk_gb"] < stages["base_small"]["disk_gb"] < stages["base"]["disk_gb"]


def test_a_student_may_be_named_like_a_stage(home: Path) -> None:
    renamed = tuple(f'distill.students.{n}.name="{name}"' for n, name in enumerate(("student_x", "base_x")))
    stages = estimated(arguments(home, "tiny", "cpu", overrides=renamed), "distill")["stages"]
    known = estimated(arguments(home, "tiny", "cpu"), "distill")["stages"]
    for new, old in (("student_x", "small"), ("base_x", "smallest")):
        assert stages[f"base_{new}"]["disk_gb"] == known[f"base_{old}"]["disk_gb"]
        assert stages[f"student_{new}"]["disk_gb"] == known[f"student_{old}"]["disk_gb"]


def test_what_does_not_fit_is_refused_with_fields_that_help(home: Path) -> None:
    with pytest.raises(InputError) as error:
        estimated(arguments(home, "qwen2.5-1.5b", "A100", "memory=24e9"))
    said = str(error.value)
    assert re.match(r"cold_start_sft does not fit: update holds 29\.\d GB on each device, and of A100's 24\.0 GB", said)
    assert "\n" not in said
    said, _, others = said.partition(". Nor do these fit: ")
    assert "reasoning_rl" in others.split(", ")
    remedies = said.partition("one of these is enough: ")[2].split(", ")
    assert remedies and "cold_start_sft.hardware.processes=2" in remedies
    for remedy in remedies:  # each is a field of the recipe, after which another stage breaks, if any
        with pytest.raises(InputError, match="reasoning_rl does not fit"):
            estimated(arguments(home, "qwen2.5-1.5b", "A100", "memory=24e9", overrides=(remedy,)))


GPU_RECIPES = sorted({*shipped()} - {"tiny", "real", "smollm2-135m"})


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_fits_what_it_names(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    overrides = ["base.model=HuggingFaceTB/SmolLM2-135M"] if name in ("real", "smollm2-135m") else []
    recipe = load_recipe(name, overrides)
    for flow in ("r1", *(["r1_zero"] if recipe.r1_zero else [])):
        asked = arguments(tmp_path, name, None, overrides=tuple(overrides))
        asked.config = None
        made = estimated(asked, flow)  # refuses what does not fit
        assert made["device"]["kind"] == ("cuda" if name in GPU_RECIPES else "cpu")


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_recipes_for_gpus_are_complete(name: str) -> None:
    recipe = load_recipe(name)
    for rl in (recipe.reasoning_rl, recipe.alignment_rl, recipe.r1_zero):
        assert rl is not None and rl.engine is not None and rl.hardware.mixed_precision and rl.validate_every
        longest, prompt = rl.engine.max_model_len or 2**17, [0] * 512
        check([prompt], rl.sampling, longest, logprobs=True)  # refuses what vLLM would do otherwise
        assert rl.validation.sampling is not None
        check([prompt], rl.validation.sampling, longest, logprobs=False)
    assert recipe.sft_data.engine is not None and recipe.evaluate.sets and recipe.sft.hardware.mixed_precision


def test_host_memory_by_hand(home: Path) -> None:
    # 2 GB of libraries in each of eight processes, and 7.62 B weights in float32 in the one that saves them.
    asked = arguments(home, "r1-distill-qwen-7b", "H100")
    asked.config = None
    stages = estimated(asked)["stages"]
    assert stages["sft"]["host_gb"] == pytest.approx(2 + 7.62 * 4 / 8, abs=0.05)
    # The process that copies the base model reads its weights as pages of their files.
    assert stages["base"]["host_gb"] == 2
    # 804,745 samples of 52 bytes are 42 MB more than the cold start's 5,000.
    asked = arguments(home, "r1-paper", None)
    asked.config = None
    paper = estimated(asked)["stages"]
    assert paper["sft"]["host_gb"] - paper["cold_start_sft"]["host_gb"] == pytest.approx(0.0416, abs=0.0005)


def test_too_little_host_memory_is_refused(home: Path) -> None:
    """2 GB of libraries, and 6.2 GB of weights in float32 to save, divided among four processes."""
    said = (
        r"cold_start_sft does not fit: it holds 8\.2 GB of the machine's memory for each device, of 4\.0 GB; one of "
        r"these is enough: cold_start_sft\.hardware\.processes=4\. "
    )
    with pytest.raises(InputError, match=said):
        estimated(arguments(home, "qwen2.5-1.5b", "H100", "host_memory=4e9"))
    with pytest.raises(InputError, match=r"base does not fit: .*, of 1\.0 GB; take machines with more memory\. "):
        estimated(arguments(home, "qwen2.5-1.5b", "H100", "host_memory=1e9"))


def refused(home: Path, model: str, *assume: str) -> str:
    asked = arguments(home, "qwen2.5-1.5b", "H100", *assume, overrides=(f"base.model={model}",))
    asked.config = None
    with pytest.raises(InputError) as error:
        estimated(asked)
    return str(error.value)


def test_a_large_model_is_proposed_more_machines(home: Path) -> None:
    """16 devices for 32.8 B: 16 bytes a weight are 33 GB on each, and the gathered weights fit beside them. On 8 they
    are 66 GB."""
    said = refused(home, "Qwen/Qwen2.5-32B")
    assert "together these fit: cold_start_sft.hardware.processes=8 cold_start_sft.hardware.nodes=2." in said


def test_what_fits_neither_host_nor_device_is_proposed_more_machines(home: Path) -> None:
    """One process saves 70.6 B weights in float32: 282 GB of the machine's memory, which has 256 GB for each device."""
    said = refused(home, "meta-llama/Llama-3.1-70B")
    assert "holds 284.2 GB of the machine's memory for each device, of 256.0 GB; together these fit: " in said
    assert "cold_start_sft.hardware.processes=8 cold_start_sft.hardware.nodes=4 " in said


def test_what_no_number_of_devices_holds_needs_another_engine(home: Path) -> None:
    """One process saves 671 B weights in float32: 2.7 TB, more than a machine has."""
    said = refused(home, "deepseek-ai/DeepSeek-V3")
    assert "no number up to 256 fits" in said and "verl with strategy 'megatron' divides layers" in said


def test_a_stage_that_is_not_divided_needs_a_larger_device(home: Path) -> None:
    """One process copies the base model, whose first block and embeddings have 3.0 B weights: 11.8 GB."""
    said = refused(home, "meta-llama/Llama-3.1-70B", "host_memory=4e12", "memory=10e9")
    assert said.startswith("base does not fit") and "; take devices with more memory. Nor do these fit: " in said


def test_a_model_whose_shape_is_not_known_is_asked_for(home: Path) -> None:
    asked = arguments(home, "qwen2.5-1.5b", "H100", overrides=("base.model=nobody/has-this",))
    asked.config = None
    with pytest.raises(InputError, match=r"nobody/has-this: its config.json is not on this machine; .* --config FILE"):
        estimated(asked)
    (home / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json: has no 'num_attention_heads'"):
        estimated(arguments(home, "qwen2.5-1.5b", "H100"))


@pytest.mark.parametrize(
    ("device", "assume", "said"),
    [
        ("B9", (), "--device B9: give one of H200, H100, A100, cpu"),
        ("H100", ("memory",), "--assume memory: write NAME=NUMBER"),
        ("H100", ("memory=-1",), "give a number above 0"),
        ("H100", ("speed=1",), "--assume speed=1: unknown; there are prompt_tokens, "),
    ],
)
def test_wrong_assumptions_are_named(home: Path, device: str, assume: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        assumptions_of(arguments(home, "tiny", device, *assume))


def test_the_record_of_a_run_has_assumptions_and_stages(home: Path) -> None:
    recipe = load_recipe("tiny")
    made = json.loads(for_record(GRAPHS["r1"](recipe), recipe) or "")
    assert set(made) == {"device", "assumed", "stages", "total"} and made["device"]["memory"] > 1e8
    assert made["stages"]["reasoning_rl"]["peak_phase"] in ("loading", "sampling", "measuring", "update")


# Of DeepSeek-V2-Lite, whose queries have no low rank.
LITE = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "tie_word_embeddings": False,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}  # fmt: skip


def recorded(home: Path, config: str) -> str | None:
    """What a run would record with a base model that has this config.json."""
    (home / "config.json").write_text(config)
    recipe = load_recipe("qwen2.5-1.5b", [f"base.model={home}"])
    return for_record(GRAPHS["r1"](recipe), recipe)


def test_the_record_of_a_run_knows_models_whose_queries_have_no_low_rank(home: Path) -> None:
    stages = json.loads(recorded(home, json.dumps(LITE)) or "")["stages"]
    assert stages["base"]["disk_gb"] == pytest.approx(2 * 2 * 15.7, rel=0.01)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (json.dumps(LITE | {"hidden_size": "wide"}), "hidden_size is 'wide', and must be a whole number"),
        (json.dumps(LITE | {"kv_lora_rank": [512]}), "kv_lora_rank is "),
        (json.dumps(LITE | {"text_config": {"hidden_size": None}}), "has no 'hidden_size'"),
        (json.dumps([LITE]), "it is no JSON object"),
        ("null", "it is no JSON object"),
        ("[" * 100_000, "recursion"),
        ("{", "Expecting property name"),
    ],
)
def test_a_config_that_cannot_be_read_is_bad_input_and_costs_a_run_its_estimate_alone(
    config: str, said: str, home: Path
) -> None:
    assert recorded(home, config) is None
    with pytest.raises(InputError, match=re.escape(said)):
        estimated(arguments(home, "qwen2.5-1.5b", "H100"))


def test_whatever_goes_wrong_a_run_has_no_estimate(home: Path, monkeypatch, caplog) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flows.run.estimate.local_device", fails)
    assert recorded(home, json.dumps(QWEN)) is None
    assert "this run has no estimate" in caplog.text
