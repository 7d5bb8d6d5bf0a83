"""Benchmarks that need a package which is not installed: one line with pip's command, before anything starts."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GGUF = ["real_model", "rollouts", "growth", "sampler_mismatch", "profile_step", "grpo_vs_trl"]
FOLDER = {"real_model": "--folder"}
"""Their option for the folder that they write to, where it is not --build."""


pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def stopped(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What a benchmark prints that stops with exit code 2."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
    return str(printed.err)


@pytest.mark.parametrize("name", GGUF)
def test_what_converts_smollm2_needs_gguf(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    said = stopped(name, [FOLDER.get(name, "--build"), str(tmp_path / "build")], monkeypatch, capsys)
    assert said == f"error: gguf not installed; install with: {sys.executable} -m pip install 'gguf>=0.19'\n"
    assert not (tmp_path / "build").exists()


def test_the_comparison_with_trl_needs_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    said = stopped("grpo_vs_trl", ["--build", str(tmp_path / "build")], monkeypatch, capsys)
    assert said.startswith("error: trl not installed; ") and said.endswith("-m pip install 'trl>=1.16,<1.17'\n")
    assert not (tmp_path / "build").exists()


def test_an_engine_that_needs_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    import rollout_engines

    with pytest.raises(SystemExit) as ended:
        rollout_engines.main("vllm", str(tmp_path / "case.json"))
    assert ended.value.code == 2 and "has no vllm; `make vllm` installs it" in capsys.readouterr().err
    arguments = ["--engine", "vllm", "--vllm", str(tmp_path / "python"), "--build", str(tmp_path / "build")]
    assert "`make vllm` installs it" in stopped("rollouts", arguments, monkeypatch, capsys)


def test_a_judge_without_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    said = stopped("gaming", ["--judge", str(tmp_path / "judge")], monkeypatch, capsys)
    assert said.startswith(f"error: --judge {tmp_path / 'judge'}: no model folder")


def test_where_smollm2_is_already_no_gguf_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import extras

    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / extras.SMOLLM2).mkdir()
    (tmp_path / extras.SMOLLM2 / "config.json").write_text("{}")
    extras.need_smollm2(tmp_path)


def test_no_benchmark_imports_an_extra_at_its_top() -> None:
    """Its import would fail before the benchmark can say what to install."""
    imports = re.compile(r"^(?:import|from) (gguf|trl|vllm|playwright|bitsandbytes|ray)\b", re.MULTILINE)
    assert [path.name for path in BENCHMARKS.glob("*.py") if imports.search(path.read_text())] == []
