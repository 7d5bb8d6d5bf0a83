"""Commands in a home whose artifacts changed on the disk: one line, never a traceback, and nothing of them is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.store.manifest import MANIFEST, Manifest, artifact_key
from tasks.store.store import Store
from tests.support.r1 import SMALLER


def checkpoint(home: Path, seed: int = 0) -> Manifest:
    config, store = {"seed": seed}, Store(home)
    with store.attempt("sft", artifact_key("sft", 1, config, {})) as attempt:
        (attempt.out / "model.safetensors").write_bytes(b"weights")
        return attempt.publish(stage_version=1, config=config)


TRAIN_ON = ["run", "tiny", "--only", "sft", "--input", "base=latest:sft", "--input", "sft_data=latest:sft"]


@pytest.mark.parametrize("arguments", [["chat", "dev3"], ["promote", "latest:sft"], TRAIN_ON])
def test_a_flipped_byte_in_the_weights_is_not_used(tmp_path: Path, r1: Any, arguments: list[str]) -> None:
    (checkpoint(tmp_path).path / "model.safetensors").write_bytes(b"Weights")
    done = type(r1)(tmp_path)(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "damaged: the contents of model.safetensors changed" in line
    assert line.endswith("`r1 verify --repair` sets it aside, and the next run makes it again, as does `--force sft`")


@pytest.mark.parametrize("arguments", [["stages"], ["plan", "tiny"], ["show", "latest:sft"]])
@pytest.mark.parametrize("created", ["5", "[" * 10_000], ids=["number", "deep"])
def test_one_wrong_manifest_does_not_hide_the_home(tmp_path: Path, r1: Any, arguments: list[str], created: str) -> None:
    kept, wrong = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2).path / MANIFEST
    wrong.write_text(wrong.read_text().replace(f'"{Store(tmp_path).list()[-1].created}"', created))
    done = type(r1)(tmp_path)(*arguments)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if str(wrong) in line]
    assert said and "Traceback" not in done.stderr
    if arguments[0] != "plan":
        assert kept.key[:12] in done.stdout


@pytest.mark.slow
def test_a_changed_artifact_is_made_again_only_when_asked(tmp_path: Path, r1: Any) -> None:
    mine = type(r1)(tmp_path)
    (made,) = mine.tiny("run", "--only", "problems")["stages"]
    file = next(tmp_path.glob(f"artifacts/problems/{made['key']}/1/*.parquet"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for command in ("plan", "run"):
        sets = [part for value in SMALLER for part in ("--set", value)]
        done = mine(command, "tiny", *sets, "--only", "problems")
        assert done.returncode == 2 and f"damaged: the contents of {file.name} changed" in done.stderr
        assert "Traceback" not in done.stderr
    (again,) = mine.tiny("run", "--only", "problems", "--force", "problems")["stages"]
    assert (again["status"], again["key"]) == ("ran", made["key"])
    (reused,) = mine.tiny("run", "--only", "problems")["stages"]
    assert reused["status"] == "reused"
    first, second = (
        json.loads((tmp_path / "artifacts" / "problems" / made["key"] / attempt / MANIFEST).read_text())
        for attempt in ("1", "2")
    )
    assert first["digest"] == second["digest"]
