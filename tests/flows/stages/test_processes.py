"""A stage in several processes and on several machines, by fields of the recipe."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from flows.stage_contract.stage import key_of
from grpo.errors import InputError
from tests.support.r1 import SMALLER

pytestmark = pytest.mark.system

STAGE = ("--only", "cold_start_sft", "--set", "cold_start_sft.max_steps=3")


WAYS = ("={processes=4,sequence_parallel=2}", "={processes=4,tensor_parallel=2}")


def only_stage(result: dict[str, Any]) -> dict[str, Any]:
    (stage,) = result["stages"]
    return stage


def test_where_and_how_a_stage_computes_is_no_part_of_the_key() -> None:
    from flows.stages.cold_start_sft import STAGE as stage

    keys = {
        key_of(stage, load_recipe("tiny", [f"cold_start_sft.hardware{field}"]).cold_start_sft, 0, {})
        for field in (".device=cpu", ".fused=false", ".processes=8", ".nodes=4", *WAYS)
    }
    assert len(keys) == 1
    mixed = "cold_start_sft.hardware={dtype='bfloat16',mixed_precision=true}"
    assert key_of(stage, load_recipe("tiny", [mixed]).cold_start_sft, 0, {}) not in keys


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cold_start_sft.hardware.processes=0", "cold_start_sft.hardware.processes: Input should be greater than"),
        ("reasoning_rl.hardware.node=2", "reasoning_rl.hardware.node: unknown field; did you mean 'nodes'?"),
        (
            "sft.hardware.mixed_precision=true",
            "sft.hardware: mixed_precision is bfloat16 arithmetic on float32 weights",
        ),
        ("sft.hardware.tensor_parallel=2", "sft.hardware: tensor_parallel (2) must divide processes * nodes (1)"),
        (
            "sft.hardware={processes=4,tensor_parallel=2,sequence_parallel=2}",
            "sft.hardware: tensor_parallel shares tokens among the same processes; leave sequence_parallel out",
        ),
        (
            "reward_models.helpful.hardware={processes=2,tensor_parallel=2}",
            "reward_models.helpful.hardware: tensor_parallel is for RL and SFT; set it to 1 here",
        ),
        (
            "sft.lora={}; sft.hardware={processes=2,tensor_parallel=2}",
            "sft: tensor_parallel divides no layers with adapters",
        ),
        (
            "reasoning_rl.method='ppo'; reasoning_rl.hardware={processes=2,tensor_parallel=2}",
            "reasoning_rl: tensor_parallel divides no value model",
        ),
        *(
            (
                f"{stage}.optimizer.kind='adamw_8bit'; {stage}.hardware={{processes=2,tensor_parallel=2}}",
                f"{stage}: optimizer.kind 'adamw_8bit' stores whole rows in blocks, and tensor_parallel divides rows; "
                "take 'adamw', or sequence_parallel",
            )
            for stage in ("sft", "reasoning_rl")
        ),
        (
            "sft.optimizer.kind='adam8'",
            "sft.optimizer.kind: Input should be 'adamw', 'adamw_8bit' or 'muon' (got 'adam8')",
        ),
    ],
)
def test_wrong_settings_are_one_line(override: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe("tiny", override.split("; "))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_what_two_processes_made_one_reuses(
    r1: Any, first_run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path))  # torchrun keeps what each process says
    monkeypatch.setenv("PET_REDIRECTS", "3")
    made = only_stage(r1.tiny("run", *STAGE, "--set", "cold_start_sft.hardware.processes=2"))
    assert made["status"] == "ran"
    assert sorted(path.parent.name for path in tmp_path.glob("*/attempt_0/*/stderr.log")) == ["0", "1"]
    again = only_stage(r1.tiny("run", *STAGE))
    assert (again["status"], again["key"]) == ("reused", made["key"])


def test_machines_without_a_place_to_meet_are_refused(r1: Any, first_run: dict[str, Any]) -> None:
    sets = [part for value in SMALLER for part in ("--set", value)]
    more = ("--set", "cold_start_sft.max_steps=4", "--set", "cold_start_sft.hardware.nodes=2")
    done = r1("run", "tiny", *sets, "--only", "cold_start_sft", *more)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cold_start_sft: hardware.nodes is 2, but nothing says where the machines meet")


@pytest.mark.slow
def test_the_same_command_on_two_machines(r1: Any, first_run: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    sets = [part for value in SMALLER for part in ("--set", value)]
    more = ("--set", "cold_start_sft.max_steps=5", "--set", "cold_start_sft.hardware.nodes=2")
    arguments = ["run", "tiny", *sets, "--only", "cold_start_sft", *more]
    before = {path for path in r1.home.glob("artifacts/cold_start_sft/*/*")}
    machines = [
        subprocess.Popen(
            r1.command(*arguments),
            env={**r1.environment(), "PET_RDZV_ENDPOINT": place, "PET_NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "machine 1: joins" in said[1] and "cold_start_sft" in said[1]
    assert len(set(r1.home.glob("artifacts/cold_start_sft/*/*")) - before) == 1
    assert os.listdir(r1.home / "nodes") == [place.replace(":", "_")]
