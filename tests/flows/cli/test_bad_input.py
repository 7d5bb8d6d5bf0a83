"""Wrong input: one clear line, exit code 2, no traceback, nothing half-published."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flows import stage_flows
from flows.recipe.sections import Problems
from flows.stage_contract.stage import RunContext
from grpo.errors import InputError


def published(home: Path) -> list[tuple[str, str]]:
    """(stage, key) of whatever the store shows."""
    return sorted((p.parts[-4], p.parts[-3]) for p in home.glob("artifacts/*/*/*/manifest.json"))


ROW = {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "tinny"], "unknown recipe 'tinny'; did you mean 'tiny'?"),
        (["run", "tiny", "--set", "sft.epoch=2"], "sft.epoch: unknown field; did you mean 'epochs'?"),
        (
            ["plan", "tiny", "--set", "problems.sources.0.path=x"],
            "problems.sources.0.path: unknown field of kind 'sums'; another kind has it: change kind",
        ),
        (["plan", "tiny", "--set", "problems.sources.0.kind=csv"], "problems.sources.0.kind: must be one of "),
        (["plan", "tiny", "--set", 'problems.sources=[{path="x"}]'], "problems.sources.0.kind: is missing"),
        (["plan", "tiny", "--set", 'problems.sources=[{kind="file", pathh="x"}]'], "did you mean 'path'?"),
        (["plan", "tiny", "--set", "kl_coef=1"], "kl_coef: unknown field; did you mean 'reasoning_rl.kl_coef' or "),
        (["plan", "tiny", "--set", "zzz=1"], "zzz: unknown field; remove it"),
        (["run", "tiny", "--set", "sft.epochs=0"], "sft.epochs: Input should be greater than or equal to 1 (got 0)"),
        (["run", "tiny", "--flow", "r2"], "argument --flow: invalid choice: 'r2'"),
        (["run", "tiny", "--onyl", "sft"], "unrecognized arguments: --onyl sft"),
        (["run", "tiny", "--only", "stf"], "unknown stage 'stf'; the stages are problems, base"),
        (["run", "tiny", "--only", "sft", "--from", "sft"], "give --from or --only"),
        (["run", "tiny", "--only", "sft", "--input", "sft=latest"], "--input sft: no stage is left to run"),
        (["run", "tiny", "--force", "sft", "--input", "sft=latest"], "--force sft: --input gives it"),
        (["run", "tiny", "--only", "base", "--force", "sft"], "--force sft: this run does only base"),
        (
            ["plan", "tiny", "--from", "evaluate", "--input", "cold_start_data=latest"],
            "--input cold_start_data: nothing in this run reads it; it does only evaluate, report",
        ),
        (
            ["plan", "smollm2-135m", "--set", "problems.sources.0.path=./no"],
            "problems.sources.0.path: no: no such file",
        ),
        (["run", "smollm2-135m"], "problems.sources.0.path: gsm8k.jsonl: no such file or folder"),
        (["run", "tiny", "--input", "base=/nowhere"], "/nowhere: no such file or folder"),
        (["show", "abcdef12"], "no artifact"),
        (["show", "latest:sft"], "no artifact of stage 'sft'"),
        (["chat", "dev1"], "no artifact of stage 'cold_start_sft'"),
        (["chat", "dev9"], "dev9: no checkpoint has this name; these do: base, zero, dev1"),
        (["chat", "./dev1"], "./dev1: no such folder"),
        (["plan", "~nosuch/x.toml"], "~nosuch/x.toml: ~nosuch is no user's home folder; write the whole path"),
        (["init", "~nosuch/x.toml"], "~nosuch is no user's home folder"),
        (["chat", "~nosuch/model"], "~nosuch is no user's home folder"),
        (["run", "tiny", "--input", "base=~nosuch/model"], "~nosuch is no user's home folder"),
        (["export", "latest:sft", "~nosuch/out"], "~nosuch is no user's home folder"),
        (["eval", "./m", "--sets", "gsm8k=~nosuch/rows"], "~nosuch/rows: ~nosuch is no user's home folder"),
        (
            ["plan", "tiny", "--set", 'problems.sources=[{kind="file", path="~nosuch/x"}]'],
            "problems.sources.0.path: ~nosuch/x: ~nosuch is no user's home folder",
        ),
        (["plan", "tiny", "--estimate", "--assume", "prompt_tokens=nan"], "prompt_tokens=nan: give a number above 0"),
        (["plan", "tiny", "--estimate", "--assume", "prompt_tokens=inf"], "prompt_tokens=inf: give a number above 0"),
    ],
)
def test_the_command_line(tmp_path: Path, r1: Any, arguments: list[str], said: str) -> None:
    done = type(r1)(tmp_path)(*arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not published(tmp_path)


@pytest.mark.parametrize("mistake", [["tinny"], ["tiny", "--set", "sft.epochs=0"]])
def test_a_mistake_in_a_recipe_starts_no_server(tmp_path: Path, r1: Any, mistake: list[str]) -> None:
    assert type(r1)(tmp_path)("run", *mistake).returncode == 2
    assert not list(tmp_path.rglob("*.db")) and not list(tmp_path.rglob("*.log"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", json.dumps({"question": "?"}), "answer"),
        ("a.jsonl", f"{json.dumps(ROW)}\n{{broken", "line 2"),
        ("a.jsonl", "", "empty"),
        ("a.csv", "question,anwser\n1+1,2", "answer"),
        ("a.parquet", "no parquet", "parquet"),
        ("a.txt", "text", "not supported"),
    ],
)
def test_problem_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, said: str) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    (tmp_path / name).write_text(content)
    config = Problems.model_validate({"sources": [{"kind": "file", "path": tmp_path / name}]})
    with pytest.raises(InputError) as error:
        stage_flows.problems.fn(config, {}, 0, RunContext())
    assert said in str(error.value) and name in str(error.value) and "\n" not in str(error.value)
    assert not published(tmp_path / "home")


@pytest.mark.slow
def test_a_folder_that_is_no_model(tmp_path: Path, r1: Any) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(json.dumps(ROW) for _ in range(3)))
    sets = [f"base.model={tmp_path / 'model'}", f"problems.sources.0.path={tmp_path / 'gsm8k.jsonl'}"]
    arguments = [part for value in sets for part in ("--set", value)]
    done = type(r1)(tmp_path / "home")("run", "smollm2-135m", *arguments, "--only", "base")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: base: ") and "not a model folder" in done.stderr
    assert not published(tmp_path / "home")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="mounting a small file system needs mount")
def test_a_full_disk(tmp_path: Path, r1: Any) -> None:
    place = tmp_path / "home"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        small = type(r1)(place)
        assert small("run", "tiny", "--only", "problems").returncode == 0
        room = 6 * 2**20  # enough for the databases to grow, not for two checkpoints
        (place / "filler").write_bytes(b"x" * (shutil.disk_usage(place).free - room))
        quick = ("base.documents=4000", "base.pretrain.steps=60", "base.pretrain.save_every=10")
        done = small("run", "tiny", "--only", "base", *(part for value in quick for part in ("--set", value)))
        assert done.returncode == 2, done.stderr
        assert "no space left" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
        assert [stage for stage, _ in published(place)] == ["problems"]
        (place / "filler").unlink()
        again = small("run", "tiny", "--only", "base", *(part for value in quick for part in ("--set", value)))
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", str(place)], check=False)
