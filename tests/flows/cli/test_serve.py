"""`r1 serve`: a real server of a real model, asked by the client of OpenAI."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli import serve
from flows.cli.main import parser
from grpo.errors import InputError
from tests.support.published import publish
from tests.support.r1 import ROOT
from tests.support.vllm_models import tiny_llama

PROMPT = [{"role": "user", "content": "compute 3 + 4"}]


def given(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["serve", *arguments])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    return publish("sft", {}, {}, Path(tiny_llama(tmp_path / "model", tied=True))).path


def test_without_a_server_one_line_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MODULES", {"vllm": ("no_such_vllm",), "transformers": ("no_such_openai", "uvicorn")})
    with pytest.raises(InputError, match=r"needs no_such_vllm: .*r1flow\[vllm\].*needs no_such_openai: .*\[serve\]"):
        serve.run(given("dev3"))


def test_a_port_in_use_is_one_line(model: Path) -> None:
    pytest.importorskip("openai", reason="pip install 'r1flow[serve]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="in use on 127.0.0.1; choose another with --port"):
            serve.run(given("dev3", "--engine", "transformers", "--port", str(taken.getsockname()[1])))


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "config.json is missing"), ("{", "config.json cannot be read as JSON"), ("{}", "no .*safetensors weights")],
)
def test_a_folder_without_a_model_is_one_line(tmp_path: Path, config: str | None, message: str) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=message):
        serve.run(given(str(tmp_path)))


@pytest.mark.system
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_transformers_answers_in_the_words_of_the_checkpoint(model: Path, tmp_path: Path, stop: int) -> None:
    openai = pytest.importorskip("openai", reason="pip install 'r1flow[serve]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flows.cli", "serve", "latest:sft", "--engine", "transformers"]
    command += ["--port", str(port), "--options", "--device cpu"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 180
        while "transformers serves model 'latest-sft' at " not in (text := (tmp_path / "log").read_text()):
            assert server.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
        answer = client.chat.completions.create(model="latest-sft", messages=PROMPT, temperature=0, max_tokens=8)
        said = answer.choices[0].message.content
        assert list(client.models.list()) == []  # of the cache of the hub
        with pytest.raises(openai.APIStatusError):  # it serves this model alone
            client.chat.completions.create(model="other", messages=PROMPT)
        server.send_signal(stop)
        assert server.wait(60) == 0, (tmp_path / "log").read_text()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    finally:
        server.kill()
        server.wait()
    tokenizer, local = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        new = local.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert said and said == tokenizer.decode(new, skip_special_tokens=True)
