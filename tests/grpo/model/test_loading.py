"""Model folders with something wrong in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import build
from grpo.config.common import Hardware, Lora
from grpo.config.jobs import CopyModelJob
from grpo.distributed.fsdp import shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import load_policy, load_tokenizer, way_of
from grpo.model_folder import check_model_folder, load_checked
from grpo.training.copy_model import copy_model

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
    "adapters": (write("adapter_config.json", "{}"), "it has adapters beside its weights .* merge_and_unload"),
    "no weights": (remove("model.safetensors"), "weights"),
    "corrupt weights": (write("model.safetensors", "not tensors"), "cannot load a language model"),
    "empty weights": (write("model.safetensors", ""), "cannot load a language model"),
    "config is not JSON": (write("config.json", "{"), "config.json cannot be read as JSON"),
    "config is a list": (write("config.json", "[]"), "config.json is not a JSON object"),
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


def test_adapters_that_transformers_found_at_the_hub(model_folder):
    class Loader:
        @staticmethod
        def from_pretrained(name, **_):
            loaded = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
            loaded[0]._hf_peft_config_loaded = True
            return loaded

    with pytest.raises(InputError, match=r"some/model: it has adapters beside its weights \(adapter_config\.json\)"):
        load_checked(Loader, "some/model", "language model")


def test_an_adapter_of_the_head_is_refused(folder, tmp_path):
    """It would not be trained, and merged into embeddings that are tied to the head, it would be another model."""
    build("llama", tmp_path / "untied")
    tied, untied = str(folder), str(tmp_path / "untied")
    for model, modules in ((untied, ["lm_head"]), (tied, ["lm_head", "q_proj"]), (tied, ["embed_tokens"])):
        with pytest.raises(InputError, match=rf"lora\.target_modules: '.*{modules[0]}' of .* take it out of") as caught:
            load_policy(model, CPU, Lora(target_modules=modules))
        assert "\n" not in str(caught.value)
    for target_modules in (["embed_tokens", "q_proj"], "all-linear"):
        load_policy(untied, CPU, Lora(target_modules=target_modules))


CONTRADICTIONS = [
    ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    ({"temperature": 0.6, "do_sample": False}, {"do_sample": True, "temperature": 0.6}),
    ({"top_k": 20, "early_stopping": True}, {}),
    ({"do_sample": True, "top_p": 0.9}, {"do_sample": True, "top_p": 0.9}),
]


@pytest.mark.parametrize(("own", "saved"), CONTRADICTIONS)
def test_generation_settings_that_transformers_does_not_write(own, saved, folder, tmp_path):
    path = folder / "generation_config.json"
    ends = {name: number for name, number in json.loads(path.read_text()).items() if name[:4] in ("bos_", "eos_")}
    path.write_text(json.dumps(ends | own))
    copy_model(CopyModelJob.model_validate({"model": str(folder), "hardware": CPU, **places(tmp_path)}))
    shard(load_policy(str(folder), CPU), Parallel.alone(torch.device("cpu"))).save(tmp_path / "saved")
    for out in (tmp_path / "out", tmp_path / "saved"):
        found = json.loads((out / "generation_config.json").read_text())
        assert {name: value for name, value in found.items() if name != "transformers_version"} == ends | saved


def test_a_missing_folder():
    with pytest.raises(InputError, match="/no/such/model: no such model folder"):
        load_policy("/no/such/model", CPU)


def test_a_folder_without_tokenizer(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match="there is no tokenizer in this folder") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_not_a_folder():
    check_model_folder("organisation/model")  # nothing to check before it is fetched


def test_the_home_folder_is_understood(model_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(model_folder).parent))
    assert load_tokenizer(f"~/{Path(model_folder).name}").eos_token == "<|end|>"


@pytest.fixture
def folder(model_folder, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def refused(folder) -> str:
    with pytest.raises(InputError) as caught:
        load_policy(str(folder), CPU)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(folder, number):
    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 2] = number

    change_weights(folder, spoil)
    assert "'model.layers.1.mlp.up_proj.weight' has numbers in it that are not finite" in refused(folder)


@pytest.mark.parametrize("layers", [1, 0, -1])
def test_weights_of_more_layers_than_the_config_has(folder, layers):
    """The folder has 2. transformers leaves the others out without a word."""
    change_config(num_hidden_layers=layers)(folder)
    said = refused(folder)
    assert f"config.json describes {max(layers, 0)} of model.layers" in said or "cannot load a language model" in said


def test_weights_in_pickles_are_not_read(folder, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Attack()}, folder / "pytorch_model.bin")
    assert "not in safetensors but in pytorch_model.bin" in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_pickles_beside_safetensors_are_not_read(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    assert load_policy(str(folder), CPU) is not None


def test_a_tokenizer_of_another_model(folder, tmp_path):
    def shorten(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in weights:
                weights[name] = weights[name][:20].clone()

    change_weights(folder, shorten)
    change_config(vocab_size=20)(folder)
    job = CopyModelJob.model_validate({"kind": "copy_model", "model": str(folder), "hardware": CPU, **places(tmp_path)})
    for reads in (lambda: copy_model(job), lambda: way_of(str(folder), CPU)):
        with pytest.raises(InputError, match="the tokenizer is another model's") as caught:
            reads()
        assert "the model's vocabulary ends at 19" in str(caught.value)


@pytest.mark.parametrize("changed", [{"model_type": "no_such_type"}, {"num_hidden_layers": "two"}, {"hidden_size": 0}])
def test_what_copies_a_model_says_in_one_line_what_is_wrong_with_it(folder, tmp_path, changed):
    """The configuration is read before the weights, to find the first blocks."""
    change_config(**changed)(folder)
    job = CopyModelJob.model_validate({"kind": "copy_model", "model": str(folder), "hardware": CPU, **places(tmp_path)})
    with pytest.raises(InputError, match="cannot load a (language model|tokenizer) from here") as caught:
        copy_model(job)
    assert "\n" not in str(caught.value)


def places(tmp_path) -> dict:
    return {"seed": 0} | {name: str(tmp_path / name) for name in ("out", "state", "metrics", "result")}


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own_words"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change_config(model_type="own_words", auto_map=auto, architectures=["OwnModel"])(folder)
    return folder


def test_code_of_a_model_folder_does_not_run(own_code, tmp_path):
    said = refused(own_code)
    assert "model_type 'own_words', is code of its own" in said and "remote_code = true" in said
    assert not (tmp_path / "ran").exists()


def test_nobody_is_asked_on_the_terminal(own_code, tmp_path, monkeypatch):
    """transformers would ask, and a "y" from a pipe would run the code. It knows llama, so ours is not refused."""
    (own_code / "config.json").write_text((own_code / "config.json").read_text().replace("own_words", "llama"))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "y")
    assert type(load_policy(str(own_code), CPU)).__name__ == "LlamaForCausalLM"
    assert load_tokenizer(str(own_code)) is not None
    assert asked == [] and not (tmp_path / "ran").exists()


def test_code_of_a_model_folder_runs_where_a_field_says_so(own_code, tmp_path):
    trusting = Hardware(device="cpu", remote_code=True)
    job = {"kind": "copy_model", "model": str(own_code), "hardware": trusting, **places(tmp_path)}
    copy_model(CopyModelJob.model_validate(job))
    assert (tmp_path / "ran").exists()
    copied = load_policy(str(tmp_path / "out"), trusting)  # the artifact is whole: it has the code, too
    assert type(copied).__name__ == "OwnModel"
    with pytest.raises(InputError, match="is code of its own"):
        load_policy(str(tmp_path / "out"), CPU)


def test_code_of_a_tokenizer_never_runs(folder, tmp_path):
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    path = folder / "tokenizer_config.json"
    tokenizer = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": ["own.OwnConfig", None]}}
    path.write_text(json.dumps({**tokenizer, "tokenizer_class": "OwnConfig"}))
    try:
        load_tokenizer(str(folder))
    except InputError as error:
        assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


def test_the_default_leaves_records_as_they_were():
    assert "remote_code" not in Hardware().model_dump() and Hardware(remote_code=True).model_dump()["remote_code"]


def test_a_model_of_the_hub_is_found_where_it_is_kept(model_folder, tmp_path):
    kept = tmp_path / "hub" / "models--some--model"
    shutil.copytree(model_folder, kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    code = """
import sys
from grpo.errors import InputError
from grpo.model_folder import hub_snapshot, stored_dtype
folder = hub_snapshot("some/model")
print(folder, stored_dtype(folder))
try:
    hub_snapshot("some/other")
except InputError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, refused = done.stdout.splitlines()
    assert found == f"{kept / 'snapshots' / 'abc'} float32"
    assert refused.startswith("some/other: cannot load a language model from here: ")
