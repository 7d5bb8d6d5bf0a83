"""Folders whose weights are quantized: a model is read, and copied, with plain ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import COMPLETIONS, PROMPT_ROWS, alone, build
from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.model.loading import Kind, load_policy
from grpo.model.sharded.loading import load_to_copy

CPU = Hardware(device="cpu")
SIZES = {
    "llama": {"hidden_size": 192, "intermediate_size": 320},
    "deepseek_v3": {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 144, "kv_lora_rank": 136},
}
"""More than one block of 128 x 128 in a matrix, the last of which is smaller."""
PLAIN = ("embed_tokens", "lm_head", "norm", "gate.weight", "e_score_correction_bias")
FOUR_BITS = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in DeepSeek's form: numbers of 8 bits, the scale of each block, and the weights that these are."""
    rows, columns = (math.ceil(length / 128) for length in weight.shape)
    whole = torch.zeros(rows * 128, columns * 128)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    blocks = whole.view(rows, 128, columns, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    read = numbers.float() * scales[:, None, :, None]
    cut = [part.reshape(whole.shape)[: weight.shape[0], : weight.shape[1]].contiguous() for part in (numbers, read)]
    return cut[0], scales, cut[1]


def quantize(folder: Path, plain: Path) -> None:
    """Makes a folder one in FP8, and writes `plain`, the same model with the weights that these are."""
    weights, stored, read = load_file(folder / "model.safetensors"), {}, {}
    for name, weight in weights.items():
        stored[name], read[name] = weight, weight
        if not any(part in name for part in PLAIN):
            stored[name], stored[f"{name}_scale_inv"], read[name] = in_fp8(weight)
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    save_file(read, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    configure(folder, quantization_config=described)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


@torch.no_grad()
def logprobs(folder: Path) -> Sequence[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [alone(model, prompt, completion) for prompt, completion in zip(PROMPT_ROWS, COMPLETIONS, strict=True)]


@pytest.fixture(params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    build(request.param, tmp_path / "model", **SIZES[request.param])
    quantize(tmp_path / "model", tmp_path / "plain")
    return tmp_path / "model"


def test_a_copy_has_the_weights_that_fp8_stands_for(folder: Path) -> None:
    copy, plain = folder.with_name("copy"), folder.with_name("plain")
    load_to_copy(str(folder), CPU).save_pretrained(copy)
    saved, expected = load_file(copy / "model.safetensors"), load_file(plain / "model.safetensors")
    assert saved.keys() == expected.keys()
    for name, weight in saved.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0, msg=name)
    assert json.loads((copy / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    for found, row in zip(logprobs(copy), logprobs(plain), strict=True):
        torch.testing.assert_close(found, row, rtol=0, atol=0)


def test_a_policy_has_them_too(folder: Path) -> None:
    found = load_policy(str(folder), CPU).state_dict()
    for name, weight in load_policy(str(folder.with_name("plain")), CPU).state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, msg=name)


def test_scales_without_a_word_of_them_in_the_config(folder: Path) -> None:
    configure(folder, quantization_config=None)
    with pytest.raises(
        InputError, match=r"its weights are quantized \('model.*_scale_inv' are scales\), but"
    ) as caught:
        load_policy(str(folder), CPU)
    assert "\n" not in str(caught.value)


def test_a_quantization_that_transformers_does_not_know(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(InputError, match=r"cannot read its quantized weights \(quant_method 'modelopt'\)") as caught:
        load_to_copy(str(folder), CPU)
    assert "\n" not in str(caught.value)


def test_a_copy_has_the_weights_that_mxfp4_stands_for(tmp_path: Path) -> None:
    build("gpt_oss", tmp_path / "model", intermediate_size=64)
    stored, expected = {}, {}
    for name, weight in load_file(tmp_path / "model/model.safetensors").items():
        if name.endswith("_proj"):  # of the experts [E, in, out]
            experts, inner, outer = weight.shape
            pairs = torch.randint(256, (experts, outer, inner // 32, 16)).byte()  # two numbers in each
            powers = torch.randint(120, 126, (experts, outer, inner // 32)).byte()
            stored |= {f"{name}_blocks": pairs, f"{name}_scales": powers}
            numbers = torch.tensor(FOUR_BITS)[torch.stack([pairs & 15, pairs >> 4], -1).long()].flatten(-2)
            expected[name] = (numbers * 2.0 ** (powers.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        else:
            stored[name] = expected[name] = weight.bfloat16()
    save_file(stored, tmp_path / "model/model.safetensors", {"format": "pt"})
    configure(tmp_path / "model", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    load_to_copy(str(tmp_path / "model"), CPU).save_pretrained(tmp_path / "copy")
    saved = load_file(tmp_path / "copy/model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name].float(), weight.float()) for name, weight in expected.items())
    assert {p.dtype for p in load_policy(str(tmp_path / "model"), CPU).parameters()} == {torch.float32}


def test_weights_that_stay_quantized_are_not_copied(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Kind.load

    def load(*args: Any, **options: Any) -> Any:
        loaded = own(*args, **options)
        loaded.is_quantized = True  # as transformers marks AWQ's, say
        return loaded

    monkeypatch.setattr(Kind, "load", load)
    with pytest.raises(InputError, match="its weights are quantized, and transformers makes no plain ones") as caught:
        load_to_copy(model_folder, CPU)
    assert "\n" not in str(caught.value)
