"""What `r1 plan --estimate` proposes for models of each size fits when it is applied."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from flows.cli.plan_estimate import make
from flows.recipe.load import load_recipe
from flows.recipe.pipeline_names import PipelineName
from flows.stage_graphs import GRAPHS
from grpo.errors import InputError

TRAINED = ["cold_start_sft", "reasoning_rl", "sft", "reward_models", "alignment_rl"]
SECTIONS = ["cold_start_sft", "reasoning_rl", "sft", "reward_models.helpful", "reward_models.safe", "alignment_rl"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))


def refusal(
    model: str, device: str, capsys: pytest.CaptureFixture[str], *overrides: str, recipe: str = "qwen2.5-1.5b"
) -> str:
    """All that is said of stages that do not fit, a line each; empty if all fit."""
    return refusal_of("r1", recipe, [f"base.model={model}", *overrides], device, capsys)


def refusal_of(
    flow: PipelineName,
    recipe: str,
    overrides: list[str],
    device: str,
    capsys: pytest.CaptureFixture[str],
    assume: tuple[str, ...] = (),
) -> str:
    asked = argparse.Namespace(
        recipe=recipe, overrides=overrides, seed=None, device=device, config=None, assume=assume, calibrate=False
    )
    loaded = load_recipe(recipe, overrides)
    try:
        make(asked, GRAPHS[flow](loaded), loaded)
    except InputError as error:
        return f"{capsys.readouterr().err}{error}\n"
    return ""


def proposed(said: str) -> list[str]:
    """The overrides in the line for all stages."""
    line = next(line for line in said.splitlines() if line.startswith("all of them: "))
    return [word for word in shlex.split(line.removeprefix("all of them: ")) if word != "--set"]


def refused(said: str) -> list[str]:
    return re.findall(r"(\w+) does not fit: ", said)


@pytest.mark.parametrize(
    ("model", "device", "split"),
    [
        ("Qwen/Qwen2.5-7B", "H100", ""),
        ("Qwen/Qwen2.5-32B", "H100", "evaluate.engine={kind="),
        ("meta-llama/Llama-3.1-70B", "H100", "sft_data.engine.tensor_parallel_size="),
        ("meta-llama/Llama-3.1-70B", "H200", "reasoning_rl.engine.tensor_parallel_size="),
        ("Qwen/Qwen3-235B-A22B", "H100", "sft_data.engine.tensor_parallel_size="),
    ],
)
def test_every_stage_is_proposed_what_fits(model: str, device: str, split: str, capsys) -> None:
    said = refusal(model, device, capsys)
    assert {"cold_start_sft", "reasoning_rl"} <= {*refused(said)} and "no number" not in said
    overrides = proposed(said)
    assert any(override.startswith(split) for override in overrides)
    assert not refusal(model, device, capsys, *overrides)


def test_what_nothing_here_trains_is_sent_to_megatron(capsys) -> None:
    model, device = "deepseek-ai/DeepSeek-V3", "H200"
    said = refusal(model, device, capsys)
    assert {*TRAINED, "sft_data", "evaluate"} <= {*refused(said)}
    of = {name: next(line for line in said.splitlines() if line.startswith(f"{name} does")) for name in TRAINED}
    assert "no other engine trains reward models" in of.pop("reward_models")
    assert all("verl with strategy 'megatron' divides layers" in line for line in of.values())
    # Samples come from a server on devices of its own.
    overrides = proposed(said)
    assert 'sft_data.engine={kind="server"}' in overrides
    assert {*refused(refusal(model, device, capsys, *overrides))} == {*TRAINED}


def test_weights_that_vllms_share_does_not_hold_are_refused(capsys) -> None:
    """32.8 B weights are 65.5 GB in bfloat16, and 0.35 of 80 GB are 28. 2,048 tokens have 64 x 2 x 8 x 128 numbers of
    2 bytes each: 0.5 GB."""
    spread = [f"{section}.hardware.{field}" for section in SECTIONS for field in ("processes=8", "nodes=2")]
    smaller = [f"{section}.micro_batch_tokens=8192" for section in SECTIONS]
    said = refusal("Qwen/Qwen2.5-32B", "H100", capsys, *spread, *smaller)
    for stage in ("reasoning_rl", "alignment_rl"):
        assert (
            f"{stage} does not fit: vLLM gets 28.0 GB of each device, and needs 65.5 GB for weights, 0.5 for a longest "
            "sequence and 2.4 to compute; one of these is enough: "
        ) in said
    assert "reasoning_rl.engine.tensor_parallel_size=4" in said
    four = [f"{stage}.engine.tensor_parallel_size=4" for stage in ("reasoning_rl", "alignment_rl")]
    left = refused(refusal("Qwen/Qwen2.5-32B", "H100", capsys, *spread, *smaller, *four))
    assert {*left} == {"reward_models", "evaluate", "sft_data"}  # 68 GB hold them, without room to compute


@pytest.mark.parametrize(("memory", "is_proposed"), [("160e9", False), ("200e9", True)])
def test_adapters_of_experts_are_proposed_where_they_fit(memory: str, is_proposed: bool, capsys) -> None:
    """30.5 B weights of 4 bytes are 122 GB. Each layer's 128 experts have 2.0 B adapter weights in all, of 16 bytes:
    32 GB more, so that 144 GB are too few, and 180 are enough."""
    overrides, assume = ["base.model=Qwen/Qwen3-30B-A3B"], (f"memory={memory}",)
    said = refusal_of("r1", "qwen2.5-1.5b", overrides, "H200", capsys, assume)
    line = next(line for line in said.splitlines() if "cold_start_sft does not fit: " in line)
    assert ("cold_start_sft.lora={rank=32}" in line) == is_proposed


def test_a_later_round_is_proposed_what_its_section_can_set(capsys) -> None:
    said = refusal("Qwen/Qwen2.5-7B", "A100", capsys, "alignment.rounds=2")
    (line,) = [line for line in said.splitlines() if line.startswith("alignment_rl_2 does not fit: ")]
    assert "these" in line and " alignment_rl.hardware." in line


def test_students_are_proposed_what_their_own_sections_can_set(capsys) -> None:
    """Of the 20 MB 18 may be used. In float32 the students hold 33 and 18.2 MB while they are pretrained, 40 and 22 in
    SFT. The second one's name ends like a later round's."""
    stages = ["base_small", "student_small", "base_small_2", "student_small_2"]
    sections = [f"distill.students.{n}.{part}" for n in (0, 1) for part in ("base.pretrain", "sft")]
    named, memory = "distill.students.1.name=small_2", ("memory=2e7",)
    said = refusal_of("distill", "tiny", [named], "H100", capsys, memory)
    assert {*stages} <= {*refused(said)}
    for stage, section in zip(stages, sections, strict=True):
        assert f" {section}." in next(line for line in said.splitlines() if line.startswith(f"{stage} does not fit"))
    for_students = [override for override in proposed(said) if override.startswith("distill.")]
    left = refused(refusal_of("distill", "tiny", [named, *for_students], "H100", capsys, memory))
    assert left and not {*stages} & {*left}


def test_actors_on_ray_may_have_a_divided_vllm(capsys) -> None:
    model, device, ray = "Qwen/Qwen2.5-32B", "H100", "sft_data.ray={workers=3}"
    said = refusal(model, device, capsys, ray, "sft_data.engine.gpu_memory_utilization=0.3")
    change = "sft_data.engine.tensor_parallel_size=4"
    assert change in next(line for line in said.splitlines() if line.startswith("sft_data does not fit"))
    assert "sft_data" not in refused(refusal(model, device, capsys, ray, change))


def test_heads_that_no_number_divides_are_not_proposed_to_be_divided(capsys) -> None:
    """Qwen2.5-7B has 28 heads: four processes may share them, eight may not."""
    said = refusal("Qwen/Qwen2.5-7B", "A100", capsys, "reasoning_rl.micro_batch_tokens=1000000")
    assert "sequence_parallel=8" not in said and "tensor_parallel_size=8" not in said


@pytest.mark.parametrize(("way", "is_proposed"), [("sequence_parallel", True), ("tensor_parallel", False)])
def test_moments_of_8_bits_are_proposed_where_rows_are_whole(way: str, is_proposed: bool, capsys) -> None:
    """Some 22 GB are held and 18 may be used. Each of eight processes has two moments of 7.6 B / 8 numbers, of which
    8 bits instead of 32 save 5.7 GB."""
    hardware = f"processes=8,{way}=2,gradient_checkpointing=true,dtype='bfloat16',mixed_precision=true"
    overrides = [f"cold_start_sft.hardware={{{hardware}}}", "cold_start_sft.micro_batch_tokens=2048"]
    overrides.append("base.model=Qwen/Qwen2.5-7B")
    said = refusal_of("r1", "qwen2.5-1.5b", overrides, "H100", capsys, ("memory=20e9",))
    line = next(line for line in said.splitlines() if line.startswith("cold_start_sft does not fit"))
    assert ("cold_start_sft.optimizer.kind=adamw_8bit" in line) == is_proposed
