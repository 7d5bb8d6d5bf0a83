"""Checkpoints that MLflow itself downloads, loads and serves, from a real MLflow store."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tests.support.small_models import SHAPE

QUESTION = [{"role": "user", "content": "a b c"}]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def write_checkpoint(folder: Path) -> None:
    """A language model of a few thousand weights, with a tokenizer of letters and a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=1)).save_pretrained(folder)
    words = ["<pad>", "<end>", "<unknown>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def record(home: Path) -> Tracking:
    return Tracking(default_uri(home))


@pytest.fixture(scope="module")
def checkpoint(home: Path, record: Tracking) -> Manifest:
    """A checkpoint in the store, logged as the model `r1` of the recipe tiny, its champion."""
    with Store(home).attempt("alignment_rl", artifact_key("alignment_rl", 1, {}, {})) as attempt:
        write_checkpoint(attempt.out)
        made = attempt.publish(stage_version=1, config={})
    run = record.stage_run(None, "tiny", "alignment_rl", {}, {})
    assert record.models.log(run, made, "r1", step=1) is not None
    record.models.set_alias_now("tiny", "champion", made)
    return made


def model_of(record: Tracking, checkpoint: Manifest) -> tuple[Any, Path]:
    model = record.client.get_logged_model(record.models.find(checkpoint.digest))
    return model, Path(model.artifact_location.removeprefix("file://"))


def test_a_registered_model_loads_as_a_pipeline_and_generates(record: Tracking, checkpoint: Manifest) -> None:
    import mlflow

    mlflow.set_tracking_uri(record.uri)
    pipeline = mlflow.transformers.load_model("models:/tiny@champion")
    ((*asked, answer),) = (found["generated_text"] for found in pipeline(QUESTION, max_new_tokens=8))
    assert asked == QUESTION and answer["role"] == "assistant"
    own = pipeline.model.state_dict()
    from safetensors.torch import load_file

    assert all(own[name].equal(weight) for name, weight in load_file(checkpoint.path / "model.safetensors").items())


def test_it_is_a_pyfunc_with_signature_and_example(record: Tracking, checkpoint: Manifest) -> None:
    import mlflow

    mlflow.set_tracking_uri(record.uri)
    model = mlflow.pyfunc.load_model("models:/tiny@champion")
    assert "messages" in model.metadata.get_input_schema().input_names()
    example = model.input_example
    assert set(example) == {"messages"}
    (answer,) = model.predict({**example, "max_tokens": 4})
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] <= 4


def test_its_weights_are_the_stores_files(record: Tracking, checkpoint: Manifest, tmp_path: Path) -> None:
    import mlflow

    model, folder = model_of(record, checkpoint)
    assert model.tags["mlflow.model.isExternal"] == "false"
    assert (folder / "model" / "model.safetensors").samefile(checkpoint.path / "model.safetensors")
    mlflow.set_tracking_uri(record.uri)
    mlflow.artifacts.download_artifacts("models:/tiny@champion", dst_path=str(tmp_path))
    loaded = {path.name for path in tmp_path.rglob("*")}
    assert {"MLmodel", "model.safetensors", "tokenizer.json", "requirements.txt"} <= loaded


def test_a_model_of_an_earlier_version_is_made_loadable_by_its_alias(record: Tracking, checkpoint: Manifest) -> None:
    _, folder = model_of(record, checkpoint)
    shutil.rmtree(folder)
    record.models.set_alias_now("tiny", "champion", checkpoint)
    assert (folder / "MLmodel").is_file()


def test_what_is_no_language_model_is_logged_without_files(home: Path, record: Tracking) -> None:
    with Store(home).attempt("other", artifact_key("other", 1, {}, {})) as attempt:
        (attempt.out / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
        made = attempt.publish(stage_version=1, config={})
    record.models.log(record.stage_run(None, "tiny", "other", {}, {}), made, "other", step=1)
    model, folder = model_of(record, made)
    assert model.tags["mlflow.model.isExternal"] == "true" and not (folder / "MLmodel").exists()


def test_where_nothing_can_be_linked_the_store_keeps_the_only_copy(
    record: Tracking, checkpoint: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_file_system(*paths: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", another_file_system)
    run = record.stage_run(None, "elsewhere", "alignment_rl", {}, {})
    model_id = record.models.log(run, checkpoint, "r1", step=1)
    model = record.client.get_logged_model(model_id)
    assert model.tags["mlflow.model.isExternal"] == "true" and str(model.status) == "READY"
    assert not Path(model.artifact_location.removeprefix("file://")).exists()


def test_removing_the_files_frees_the_space(record: Tracking, checkpoint: Manifest) -> None:
    weights = checkpoint.path / "model.safetensors"
    _, folder = model_of(record, checkpoint)
    record.models.remove_files(checkpoint)
    assert not folder.exists() and weights.stat().st_nlink == 1
    record.models.set_alias_now("tiny", "champion", checkpoint)
    assert weights.stat().st_nlink == 2


@pytest.fixture
def served(record: Tracking, checkpoint: Manifest) -> Iterator[str]:
    """The address of `mlflow models serve` for the champion."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/tiny@champion"]
    command += ["--env-manager", "local", "--port", str(port), "--workers", "1"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "MLFLOW_TRACKING_URI": record.uri, "PATH": path}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.slow
def test_it_is_served(served: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(f"{served}/ping", timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(1)
    body = json.dumps({"messages": QUESTION, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{served}/invocations", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        (answer,) = json.load(reply)
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
