"""`r1 serve`: a real server of a real model, asked by the client of OpenAI."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import sysconfig
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
from tests.support.vllm_models import PYTHON, needs_vllm, tiny_llama

PROMPT = [{"role": "user", "content": "compute 3 + 4"}]


def given(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["serve", *arguments])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path / "home"))
    return publish("sft", {}, {}, Path(tiny_llama(tmp_path / "model", tied=True))).path


def test_without_a_server_one_line_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MODULES", {"vllm": ("no_such_vllm",), "transformers": ("no_such_openai", "uvicorn")})
    with pytest.raises(
        InputError, match=r"needs no_such_vllm: .*R1FLOW_TRAINER_PYTHON.*needs no_such_openai: .*\[serve\]"
    ):
        serve.run(given("dev3"))


@pytest.mark.parametrize(("missing", "started"), [((), "vllm"), (("vllm",), "transformers")])
def test_the_server_that_is_installed_is_started_vllm_first(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], started: str
) -> None:
    monkeypatch.setattr(serve, "has_module", lambda name: name not in missing)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    assert serve._engine(None) == started


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
    command = [sys.executable, "-m", "flows.cli"]
    assert answer(command, "transformers", "--device cpu", tmp_path, stop) == greedy(model)


@pytest.mark.slow
@needs_vllm
def test_vllm_answers_in_the_words_of_the_checkpoint(model: Path, tmp_path: Path) -> None:
    # vLLM's environment lacks what r1 needs and cannot share our versions of it: ours come last.
    ours = sysconfig.get_paths()["purelib"]
    start = f"import site, sys; site.addsitedir({ours!r}); from flows.cli.main import main; sys.exit(main())"
    options = "--dtype float32 --enforce-eager --max-model-len 256 --kv-cache-memory-bytes 256M"
    assert answer([str(PYTHON), "-c", start], "vllm", options, tmp_path, signal.SIGINT) == greedy(model)


def answer(command: list[str], engine: str, options: str, folder: Path, stop: int) -> str | None:
    """The reply to PROMPT of a server that `r1 serve` starts and that the signal `stop` then ends."""
    openai = pytest.importorskip("openai", reason="pip install 'r1flow[serve]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*command, "serve", "latest:sft", "--engine", engine, "--port", str(port), "--options", options]
    settings = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hf"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = folder / "log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=folder, env={**os.environ, **settings}, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 600
        while f"{engine} serves model 'latest-sft' at " not in (text := log.read_text()):
            assert server.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=240)
        reply = client.chat.completions.create(model="latest-sft", messages=PROMPT, temperature=0, max_tokens=8)
        listed = [served.id for served in client.models.list()]
        assert listed == ([] if engine == "transformers" else ["latest-sft"])  # transformers': of the hub's cache
        with pytest.raises(openai.APIStatusError):  # it serves this model alone
            client.chat.completions.create(model="other", messages=PROMPT)
        server.send_signal(stop)
        assert server.wait(60) == 0, log.read_text()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    finally:
        server.kill()
        server.wait()
    said: str | None = reply.choices[0].message.content
    return said


def greedy(model: Path) -> str:
    """The most likely reply to PROMPT, by transformers in this process."""
    tokenizer, local = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        new = local.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert text
    return str(text)
