"""`hardware.fused = false` trains and samples without the fused blocks and CPU kernels, and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo.config.common import Hardware, Sampling
from grpo.generation.sampler import sample
from grpo.model.cpu import kernels
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.token_logprobs import _TokenLogprobs
from tests.support.job_runner import RL, metrics, run_here, weights, write_job

KERNELS = [name for name in vars(kernels) if getattr(getattr(kernels, name), "__module__", "") == kernels.__name__]
STEPS = 4
MEASURED = ("loss", "kl", "reward", "grad_norm", "entropy", "completion_tokens")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CPU kernel raises."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel was called")

    for name in KERNELS:
        if name != "supports":
            monkeypatch.setattr(kernels, name, refuse)
    monkeypatch.setattr("grpo.model.decode.step_rows.decode_attention", refuse)
    monkeypatch.setattr("grpo.generation.draw_tokens.sample_tokens", refuse)


@pytest.fixture
def without_our_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax of the packed path raises."""

    def refuse(*_: object) -> None:
        raise AssertionError("our own softmax was called")

    monkeypatch.setattr(_TokenLogprobs, "apply", refuse)


def trained(folder: Path, fields: dict, fused: bool) -> Path:
    settings = {**RL, "steps": STEPS, "hardware": {"device": "cpu", "fused": fused}}
    run_here(write_job(folder, "rl", **{**fields, "settings": settings}))
    return folder


@pytest.mark.system
def test_a_few_steps_of_grpo_are_the_same_both_ways(
    rl_fields: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    fused = trained(tmp_path / "fused", rl_fields, True)
    request.getfixturevalue("without_kernels")
    plain = trained(tmp_path / "plain", rl_fields, False)
    for one, other in zip(metrics(fused), metrics(plain), strict=True):
        assert {name: other[name] for name in MEASURED if name in other} == pytest.approx(
            {name: one[name] for name in MEASURED if name in one}, rel=1e-3, abs=1e-5
        )
    after, expected = weights(plain), weights(fused)
    moved = max((weight - expected[name]).abs().max().item() for name, weight in after.items())
    # Adam divides by the root of the second moment, so rounding in a gradient near 0 can move a weight by a whole step.
    assert moved <= STEPS * RL["optimizer"]["learning_rate"]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_sampling_needs_no_kernel(model_folder: str, top_p: float) -> None:
    model = load_policy(model_folder, Hardware(device="cpu", fused=False))
    for block in model.model.layers:  # the forward passes are those of the classes
        assert not {"forward"} & {*vars(block), *vars(block.mlp), *vars(block.input_layernorm)}
    settings = Sampling(max_new_tokens=8, top_p=top_p)
    groups = sample(model, [[5, 6, 7], [8, 9]], 3, settings, eos_id=1, seeds=[1, 2])
    assert [len(group) for group in groups] == [3, 3]
    for completion in groups[0]:
        ids = torch.tensor([[5, 6, 7, *completion.tokens]])
        reference = type(model).from_pretrained(model_folder)(ids).logits.log_softmax(-1)[0, 2:-1]
        rows = reference.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(rows, torch.tensor(completion.logprobs), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("without_kernels", "without_our_softmax")
@pytest.mark.parametrize("fused", [True, False])
def test_plain_takes_everything_out(model_folder: str, fused: bool) -> None:
    model = load_policy(model_folder, Hardware(device="cpu", attention="plain", fused=fused))
    own = type(model).from_pretrained(model_folder)
    prompts, completions = [[5, 6, 7], [5, 6, 7], [8, 9]], [[10, 11, 12], [13, 4], [3, 4, 5]]
    logprobs = completion_logprobs(model, prompts, completions, 2.0)
    expected = torch.zeros_like(logprobs)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits = own(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scaled = (logits / 2).log_softmax(1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        expected = expected.index_put((torch.tensor(row), torch.arange(len(completion))), scaled)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    for one, other in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
