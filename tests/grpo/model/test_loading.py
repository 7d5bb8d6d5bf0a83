"""Model folders with something wrong in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.model.loading import check_model_folder, load_policy, load_tokenizer

CPU = Hardware(device="cpu")


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def change_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


BROKEN = {
    "no config": (remove("config.json"), "config.json is missing"),
    "no weights": (remove("model.safetensors"), "weights"),
    "corrupt weights": (write("model.safetensors", "not tensors"), "cannot load a language model"),
    "empty weights": (write("model.safetensors", ""), "cannot load a language model"),
    "config is not JSON": (write("config.json", "{"), "cannot load a language model"),
    "config is a list": (write("config.json", "[]"), "cannot load a language model"),
    "unknown architecture": (write("config.json", '{"model_type": "no-such-model"}'), "cannot load a language model"),
    "weights of another size": (change_config(hidden_size=64, head_dim=32), "cannot load a language model"),
    "garbage in config": (change_config(hidden_size="wide"), "cannot load a language model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_named_in_one_line(name, model_folder, tmp_path):
    breaks, says = BROKEN[name]
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    breaks(folder)
    with pytest.raises(InputError, match=says) as caught:
        load_policy(str(folder), CPU)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder():
    with pytest.raises(InputError, match="/no/such/model: no such model folder"):
        load_policy("/no/such/model", CPU)


def test_a_folder_without_tokenizer(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match="cannot load a tokenizer") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_not_a_folder():
    check_model_folder("organisation/model")  # nothing to check before it is fetched


def test_the_home_folder_is_understood(model_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(model_folder).parent))
    assert load_tokenizer(f"~/{Path(model_folder).name}").eos_token == "<|end|>"
