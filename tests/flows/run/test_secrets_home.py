"""Keys in the environment serve a run, and none stays in its home, its output or the arguments of its processes."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.stages.test_sft_data import publish
from tests.support.faulty_endpoint import FaultyEndpoint
from tests.support.r1 import R1

PLANTS = {
    "TEACHER_KEY": "planted-teacher-words",
    "JUDGE_KEY": "planted-judge-words",
    "HF_TOKEN": "hf_plantedplantedplanted",
    "HTTPS_PROXY": "http://someone:planted-proxy-words@127.0.0.1:9",
}
RECIPE = [
    'sft_data.engine={{kind="endpoint",base_url="{url}",model="m",api_key_env="TEACHER_KEY",retries=0}}',
    'sft_data.judge={{kind="openai",base_url="{url}",model="m",api_key_env="JUDGE_KEY",backoff_s=0.05}}',
    'sft_data.judged=["quality"]',
    "sft_data.problems=6",
    "sft_data.general=0",
    "sft_data.filters={{language_min=0}}",
]


def answers(number: int, body: dict[str, Any]) -> str:
    asked = body["messages"][-1]["content"]
    if "what is" not in asked or "<response>" in asked:
        return json.dumps({"analysis": "It is.", "quality": "good", "verdict": "correct"})
    first = asked.partition("what is ")[2].split(" + ")[0]
    return f"<think>{first} and one.</think> <answer>{int(first) + 1}</answer>"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> R1:
    for name, value in PLANTS.items():
        monkeypatch.setenv(name, value)
    return R1(tmp_path / "home")


def sampled(command: R1, endpoint: FaultyEndpoint) -> subprocess.CompletedProcess[str]:
    inputs = {"problems": publish(command.home, "problems", "a"), "reasoning_rl": publish(command.home, "reasoning_rl")}
    arguments = [part for value in RECIPE for part in ("--set", value.format(url=endpoint.url))]
    arguments += [part for pair in inputs.items() for part in ("--input", "=".join(pair))]
    return command("run", "tiny", "--only", "sft_data", *arguments)


def planted(home: Path) -> Iterator[str]:
    """Files of the home, and of nothing else, that hold a plant in their content or their name."""
    for path in home.rglob("*"):
        content = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        yield from (f"{name} in {path}" for name in PLANTS if PLANTS[name].encode() in content)
        yield from (f"a plant in {path}" for _ in range(b"planted-" in content))


@pytest.mark.system
def test_a_run_with_keys_leaves_none_in_its_home(command: R1) -> None:
    arguments: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    arguments.add(path.read_bytes())
                except OSError:
                    continue

    watching = threading.Thread(target=watch)
    watching.start()
    endpoint = FaultyEndpoint(answers)
    try:
        done = sampled(command, endpoint)
    finally:
        over.set()
        watching.join()
        endpoint.close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert {f"Bearer {PLANTS['TEACHER_KEY']}", f"Bearer {PLANTS['JUDGE_KEY']}"} == {*endpoint.keys}  # both were used
    assert [*planted(command.home)] == []
    assert (command.home / "mlflow.db").stat().st_size > 0 and [*(command.home / "prefect").glob("*.db")]
    assert any(b"grpo.fork_server" in line for line in arguments)
    assert not [line for line in arguments if any(plant.encode() in line for plant in PLANTS.values())]
    assert "planted-" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_service_that_repeats_the_key_leaves_none_either(command: R1) -> None:
    endpoint = FaultyEndpoint(lambda number, body: "401 with the key")
    try:
        done = sampled(command, endpoint)
    finally:
        endpoint.close()
    assert done.returncode == 2, done.stderr[-3000:]
    assert "no such key: Bearer ***" in done.stderr and "planted-" not in done.stdout + done.stderr
    assert [*planted(command.home)] == []


@pytest.mark.system
def test_refused_recipes_and_servers_that_are_away_leave_none(command: R1, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[tuple[dict[str, str], list[str]]] = [
        ({}, ["--set", "sft_data.judge.request.api_key=planted-words"]),
        ({}, ["--set", "sft_data.judge.base_url=https://someone:planted-words@host/v1"]),
        ({}, ["--set", "sft_data.judge={kind='openai',request={headers={Authorization='planted-words'}}}"]),
        ({"PREFECT_API_URL": "http://someone:planted-words@127.0.0.1:9/api"}, []),
        ({"MLFLOW_TRACKING_URI": "http://someone:planted-words@127.0.0.1:9"}, ["--only", "problems"]),
    ]
    for environment, arguments in tries:
        began = time.monotonic()
        done = subprocess.run(
            command.command("run", "tiny", *arguments),
            capture_output=True,
            text=True,
            env={**command.environment(), **environment},
            timeout=600,
        )
        assert done.returncode == 2, (done.stderr[-2000:], time.monotonic() - began)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert ("***@127.0.0.1:9" if environment else "put it into an environment variable") in line
        assert "planted-" not in done.stdout + done.stderr
        assert [*planted(command.home)] == [] if command.home.exists() else True
