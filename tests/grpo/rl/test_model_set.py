"""Which models a method keeps, who samples, and what the reference is."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo.config.common import Hardware
from grpo.config.rl import RL
from grpo.distributed import tensor_io
from grpo.distributed.fsdp import Sharded, local
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.rl.method_table import METHODS
from grpo.rl.model_set import Models

ALONE = Parallel.start(Hardware(device="cpu"))
PROMPTS, COMPLETIONS = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]]


def models(folder: str, **fields) -> Models:
    base = {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-3}}
    settings = RL.model_validate({**base, "hardware": {"device": "cpu"}, **fields})
    return Models(folder, settings, METHODS[settings.method], ALONE)


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    model = model.model if isinstance(model, Sharded) else model
    return completion_logprobs(model, PROMPTS, COMPLETIONS, 1.0)


@torch.no_grad()
def move(model) -> None:
    """As training would, only further."""
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)


@pytest.mark.parametrize(
    ("fields", "initial", "value"),
    [
        ({"kl_coef": 0}, False, False),  # one model
        ({"kl_coef": 0.001}, True, False),
        ({"kl_coef": 0, "method": "online_rft"}, False, False),
        ({"kl_coef": 0.001, "method": "online_rft"}, False, False),  # it has no penalty to give a weight
        ({"kl_coef": 0, "method": "rft"}, True, False),  # who samples
        ({"kl_coef": 0, "method": "dpo"}, True, False),
        ({"kl_coef": 0.001, "method": "ppo"}, True, True),
        ({"kl_coef": 0.001, "lora": {"rank": 2}}, False, False),  # the base is inside the policy
    ],
)
def test_only_what_the_method_reads_is_in_memory(model_folder, fields, initial, value):
    made = models(model_folder, **fields)
    assert (made.initial is not None, made.value is not None) == (initial, value)


@pytest.mark.parametrize(("method", "own"), [("grpo", True), ("online_rft", True), ("rft", False), ("dpo", False)])
def test_offline_methods_sample_from_the_policy_as_it_was(model_folder, method, own):
    made = models(model_folder, method=method)
    before = logprobs(made.policy)
    move(made.policy)
    with made.sampler() as sampler:
        sampled = logprobs(sampler)
    assert torch.equal(sampled, logprobs(made.policy)) == own
    assert torch.equal(sampled, before) != own


def test_jobs_without_adapters_do_not_load_peft(model_folder, monkeypatch):
    """It takes 50 MB in each process."""
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", None)  # an import would fail
    made = models(model_folder)
    with torch.no_grad(), made.reference_logprobs(1.0) as of:
        assert of([[1, 5]], [[6, 7]]).shape == (1, 2)


def test_the_reference_becomes_the_policy(model_folder):
    made = models(model_folder, reference_refresh_steps=1)
    move(made.policy)
    with made.reference() as reference:
        assert not torch.equal(logprobs(reference), logprobs(made.policy))
    made.refresh_reference()
    with made.reference() as reference:
        assert torch.equal(logprobs(reference), logprobs(made.policy))


def test_or_moves_a_quarter_of_the_way(model_folder):
    made = models(model_folder, reference_refresh_steps=1, reference_mixing=0.25)
    start = [p.clone() for p in made.initial.parameters()]
    move(made.policy)
    made.refresh_reference()
    for old, reference, new in zip(start, made.initial.parameters(), made.policy.parameters(), strict=True):
        torch.testing.assert_close(reference, 0.75 * old + 0.25 * new)


def averaged(folder: str, mixing: float) -> Models:
    mixed = {"device": "cpu", "dtype": "bfloat16", "mixed_precision": True}
    return models(folder, reference_refresh_steps=1, reference_mixing=mixing, hardware=mixed)


def test_a_moving_average_keeps_moves_that_bfloat16_would_round_away(model_folder):
    """A refresh moves a weight of 1 by at most 0.1 * 0.001; bfloat16 has steps of 1/128 above 1."""
    made = averaged(model_folder, 0.1)
    with torch.no_grad():
        for model, value in ((made.initial, 1.0), (made.policy, 1.001)):
            for parameter in model.parameters():
                local(parameter).fill_(value)
    for _ in range(20):
        made.refresh_reference()
    for parameter in made.initial.parameters():  # 0.9^20 = 0.1216 of the way is left
        torch.testing.assert_close(local(parameter), torch.full_like(local(parameter), 1.000878), atol=1e-6, rtol=0)


def test_a_moving_average_computes_in_bfloat16_and_reads_the_checkpoints_of_one_that_was_in_it(model_folder, tmp_path):
    made, narrow = averaged(model_folder, 0.1), averaged(model_folder, 1.0)
    assert {p.dtype for p in narrow.initial.parameters()} == {torch.bfloat16}
    with made.reference_logprobs(1.0) as of, narrow.reference_logprobs(1.0) as of_narrow, torch.no_grad():
        assert torch.equal(of(PROMPTS, COMPLETIONS), of_narrow(PROMPTS, COMPLETIONS))
    narrow.initial.requires_grad_(True)
    move(narrow.initial)
    narrow.initial.requires_grad_(False)
    tensor_io.write(tmp_path, narrow.modules(), {})
    tensor_io.read(tmp_path, made.modules(), {})
    for kept, old in zip(made.initial.parameters(), narrow.initial.parameters(), strict=True):
        assert torch.equal(local(kept), old.float())


@pytest.mark.parametrize("method", ["rft", "dpo"])
def test_what_writes_offline_data_is_never_refreshed(model_folder, method):
    made = models(model_folder, method=method, reference_refresh_steps=1)
    before = logprobs(made.initial)
    move(made.policy)
    made.refresh_reference()
    assert torch.equal(logprobs(made.initial), before)


def test_with_lora_the_reference_is_the_base_with_the_adapter_off(model_folder, policy, tmp_path):
    made = models(model_folder, lora={"rank": 2})
    # An adapter begins at nothing; a model without one has leaner blocks, which round otherwise.
    torch.testing.assert_close(logprobs(made.policy), logprobs(policy), atol=1e-5, rtol=0)
    move(made.policy)
    moved = logprobs(made.policy)
    assert not torch.allclose(moved, logprobs(policy), atol=1e-3)
    with made.reference() as reference:
        torch.testing.assert_close(logprobs(reference), logprobs(policy), atol=1e-5, rtol=0)
    assert torch.equal(logprobs(made.policy), moved)  # and on again
    made.policy.save(tmp_path)
    merged = load_policy(str(tmp_path), made.settings.hardware)
    torch.testing.assert_close(logprobs(merged), moved, atol=1e-4, rtol=0)
    assert torch.equal(logprobs(made.policy), moved)  # merging left the policy as it was


def test_a_restored_run_has_the_same_models(model_folder, tmp_path):
    kinds = ({"reference_refresh_steps": 1}, {"reference_refresh_steps": 1, "method": "ppo"}, {"lora": {"rank": 2}})
    for number, fields in enumerate(kinds):
        made, other = models(model_folder, **fields), models(model_folder, **fields)
        move(made.policy)
        made.refresh_reference()
        tensor_io.write(tmp_path / str(number), made.modules(), {})
        tensor_io.read(tmp_path / str(number), other.modules(), {})
        assert torch.equal(logprobs(other.policy), logprobs(made.policy))
        with made.reference() as reference, other.reference() as restored:
            assert torch.equal(logprobs(restored), logprobs(reference))


def test_lora_on_modules_that_are_not_there(model_folder):
    with pytest.raises(InputError, match=r"lora.target_modules: .* cannot have these adapters"):
        models(model_folder, lora={"target_modules": ["no_such_module"]})


def test_weights_that_are_missing_are_named(model_folder, tmp_path):
    made = load_policy(model_folder, models(model_folder).settings.hardware)
    state = {name: tensor for name, tensor in made.state_dict().items() if "layers.1.mlp" not in name}
    made.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(InputError, match=r"not a whole language model: weights are missing, 'model.layers.1.mlp"):
        load_policy(str(tmp_path), models(model_folder).settings.hardware)
