"""Trainers round the same on every x86 CPU with AVX2, and with any number of threads."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.processes import cpu_instructions
from grpo.processes.cpu_instructions import PORTABLE, VARIABLE, instruction_variables
from tasks.trainer.launch import launch
from tasks.trainer.process_group import trainer_environment

needs_avx2 = pytest.mark.skipif(not cpu_instructions._has_avx2(), reason="this CPU has no AVX2")
PRETRAIN = {
    "vocabulary": 300,
    "hidden": 96,
    "feed_forward": 288,
    "layers": 2,
    "heads": 3,
    "context": 256,
    "batch_size": 16,
    "steps": 10,
    "save_every": 100,
    "optimizer": {"kind": "muon", "learning_rate": 6e-3},  # as in the recipe tiny; it trains some weights by AdamW
    "hardware": {"device": "cpu"},
}


@needs_avx2
def test_a_trainer_is_held_to_avx2() -> None:
    environment = trainer_environment({}, "mark", Hardware())
    assert {name: environment[name] for name in PORTABLE} == PORTABLE


@needs_avx2
def test_what_the_user_has_set_stays() -> None:
    variables = instruction_variables({"ATEN_CPU_CAPABILITY": "default", "PATH": "/bin"}, "float32")
    assert variables == {name: value for name, value in PORTABLE.items() if name != "ATEN_CPU_CAPABILITY"}


def test_bfloat16_takes_what_the_cpu_has() -> None:
    bfloat16 = Hardware(dtype="bfloat16", mixed_precision=True)
    assert not PORTABLE.keys() & {*trainer_environment({}, "mark", bfloat16)} - {*os.environ}


def test_native_takes_what_the_cpu_has() -> None:
    assert instruction_variables({VARIABLE: "native"}, "float32") == {}


def test_a_cpu_without_avx2_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(cpu_instructions, "_has_avx2", lambda: False)
    assert instruction_variables({}, "float32") == {}


def test_another_choice_is_refused() -> None:
    with pytest.raises(InputError, match="R1FLOW_CPU_INSTRUCTIONS is 'avx9'; it must be 'portable' or 'native'"):
        instruction_variables({VARIABLE: "avx9"}, "float32")


@needs_avx2
@pytest.mark.system
def test_a_model_is_the_same_with_any_number_of_threads_and_narrower_vectors(tmp_path) -> None:
    # Natively, one and two threads differ after these steps on some CPUs, and AVX2 and AVX-512 do after the first.
    corpus = _corpus(tmp_path)
    settings = [
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "3", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ]
    digests = [
        _digest(tmp_path / str(number), corpus, PRETRAIN, variables) for number, variables in enumerate(settings)
    ]
    assert digests == digests[:1] * 3


@pytest.mark.system
def test_a_trainer_in_bfloat16_runs(tmp_path) -> None:
    # Restricted to AVX2, attention over the 256 tokens fails on a CPU with AMX.
    hardware = {"device": "cpu", "dtype": "bfloat16", "mixed_precision": True}
    settings = {**PRETRAIN, "steps": 2, "optimizer": {"learning_rate": 1e-3}, "hardware": hardware}
    _digest(tmp_path / "job", _corpus(tmp_path), settings, {})  # raises StageFailed if the trainer does


def _corpus(folder: Path) -> Path:
    path = folder / "corpus.txt"
    rng = random.Random(0)
    words = [f"w{number}" for number in range(60)]
    path.write_text("\n\n".join(" ".join(rng.choices(words, k=40)) for _ in range(300)))
    return path


def _digest(folder: Path, corpus: Path, settings: dict[str, Any], variables: dict[str, str]) -> str:
    """SHA-256 of the weights that a pretraining job ends with."""
    own = {name: str(folder / name) for name in ("out", "state")}
    for path in own.values():
        Path(path).mkdir(parents=True)
    files = {"metrics": str(folder / "metrics.jsonl"), "result": str(folder / "result.json")}
    job = {"kind": "pretrain", "seed": 0, "corpus": str(corpus), "settings": settings, **own, **files}
    launch(job, folder, on_metrics=lambda records: None, env=variables)
    return hashlib.sha256((folder / "out" / "model.safetensors").read_bytes()).hexdigest()
