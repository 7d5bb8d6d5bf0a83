"""`r1 env` and `r1 --version`: what a bug report needs, without secrets."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main as cli


def env(*arguments: str) -> int:
    given = cli.parser().parse_args(["env", *arguments])
    return cli.COMMANDS["env"](given)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_it_names_versions_home_and_servers(tmp_path: Path, capsys: Any) -> None:
    assert env("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["r1flow"].startswith(version("r1flow"))
    assert found["packages"]["torch"] == version("torch") and "vllm" in found["packages"]
    assert f"{os.cpu_count()} cores" in found["processor"] and found["gpus"]
    assert found["home"]["folder"] == str(tmp_path) and found["home"]["artifacts"] == 0
    assert found["servers"]["Prefect"].startswith("none; ")
    assert found["servers"]["MLflow"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert env() == 0
    text = capsys.readouterr().out
    assert f"  torch            {version('torch')}\n" in text and f"  folder           {tmp_path}\n" in text


def test_secrets_are_masked_and_a_server_that_is_away_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    secrets = {
        "HF_TOKEN": "hf_abcdefghijklmnopqrstuv",
        "MLFLOW_TRACKING_TOKEN": "plain-words",
        "PREFECT_API_AUTH_STRING": "me:pass-phrase",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:open-sesame@127.0.0.1:9/api")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert env("--json") == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert not [value for value in (*secrets.values(), "open-sesame") if value in out]
    assert found["variables"]["HF_TOKEN"] == "***" and found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["servers"]["Prefect"] == "http://***@127.0.0.1:9/api: does not answer (ConnectError)"


def test_the_version_is_one_line(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"r1flow {version('r1flow')}")
