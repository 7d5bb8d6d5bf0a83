"""Routers of mixtures of experts: found by value, frozen, balanced, replayed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.expert_replay import sizes
from benchmarks.tiny_models import COMPLETIONS, PROMPT_ROWS, PROMPTS, build
from grpo.config.common import Hardware, Lora, Sampling
from grpo.config.experts import Experts
from grpo.errors import InputError
from grpo.generation.sampler import sample
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.routers import Routing, balance_loss, experts_in_pack, prepare_routers, recorded, replayed, routers_of


def load(kind: str, folder: Path, changes: dict[str, Any] | None = None, **hardware: Any) -> Any:
    build(kind, folder, **(changes or {}))
    return load_policy(str(folder), Hardware(device="cpu", **hardware))


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_moe", 4), ("deepseek_v3", 3), ("mixtral", 4), ("llama", 0)])
def test_routers_are_found_by_what_they_return(kind: str, layers: int, tmp_path: Path) -> None:
    assert len(routers_of(load(kind, tmp_path))) == layers


def test_a_router_counts_once_with_its_adapter(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    policy = load_policy(str(tmp_path), Hardware(device="cpu"), Lora(rank=2))
    routers = prepare_routers(policy, "model", Experts(routers="frozen", replay=True))
    assert len(routers) == 4
    assert [name for name, p in policy.named_parameters() if ".gate." in name and p.requires_grad] == []


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    policy = load("llama", tmp_path)
    with pytest.raises(InputError, match="experts: llama has no router whose choice of experts is visible"):
        prepare_routers(policy, "llama", Experts(routers="frozen"))


def test_routers_that_do_not_obey_are_refused(tmp_path: Path) -> None:
    policy = load("phimoe", tmp_path)
    with pytest.raises(InputError, match=r"experts\.replay: the routers of phimoe choose in a way of their own"):
        prepare_routers(policy, "phimoe", Experts(replay=True))


def test_a_model_that_is_not_sampled_packed_is_refused(tmp_path: Path) -> None:
    policy = load("qwen3_next", tmp_path)
    with pytest.raises(InputError, match=r"experts\.replay: qwen3_next is not sampled packed"):
        prepare_routers(policy, "qwen3_next", Experts(replay=True))


def test_the_balance_loss() -> None:
    even, odd = torch.zeros(2, 2), torch.tensor([[math.log(3), 0.0]] * 2)
    both, first = torch.tensor([[0], [1]]), torch.tensor([[0], [0]])
    assert balance_loss([[Routing(even, both)]]).item() == pytest.approx(1)
    # Shares 1 and 0, probabilities 3/4 and 1/4: 2 * 3/4.
    assert balance_loss([[Routing(odd, first)]]).item() == pytest.approx(1.5)
    assert balance_loss([[Routing(odd, first)], [Routing(even, both)]]).item() == pytest.approx(1.25)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_told_experts_are_chosen_with_weights_from_the_logits(checkpointing: bool, tmp_path: Path) -> None:
    policy = load("qwen3_moe", tmp_path, gradient_checkpointing=checkpointing).train()
    routers = routers_of(policy)
    with recorded(routers) as own:
        expected = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    told = [(calls[0].experts + 1) % 4 for calls in own]
    told[0][:] = -1  # its own choice
    with replayed(routers, told):
        with recorded(routers) as calls:
            others = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
        others.sum().backward()
    assert torch.equal(calls[0][0].experts, own[0][0].experts)
    assert all(torch.equal(call[0].experts, of) for call, of in zip(calls[1:], told[1:], strict=True))
    assert (others - expected).abs().max() > 0.1
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)
    again = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    assert torch.equal(again, expected)  # nothing of it stays


@torch.no_grad()
def test_a_choice_among_groups_of_experts_is_no_choice_of_experts(tmp_path: Path) -> None:
    """Two of two groups have the shape of two of four experts."""
    groups = dict(n_group=2, topk_group=2, num_experts_per_tok=2, n_routed_experts=4)
    policy = load("deepseek_v3", tmp_path, groups)
    routers = prepare_routers(policy, "model", Experts(replay=True))
    with recorded(routers) as own:
        completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    told = [(calls[0].experts + 1) % 4 for calls in own]
    with replayed(routers, told), recorded(routers) as calls:
        completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    assert all(torch.equal(call[0].experts, of) for call, of in zip(calls, told, strict=True))


def test_routers_that_fail_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load("qwen3_moe", tmp_path)
    monkeypatch.setattr("grpo.model.routers.replayed", lambda *_: 1 / 0)
    with pytest.raises(InputError, match=r"experts\.replay: model cannot be told its experts \(ZeroDivisionError: "):
        prepare_routers(policy, "model", Experts(replay=True))


@torch.no_grad()
def test_an_update_chooses_what_the_sampler_chose(tmp_path: Path) -> None:
    policy = load("deepseek_v3", tmp_path, sizes(64), dtype="bfloat16")
    routers = prepare_routers(policy, "model", Experts(replay=True))
    settings = Sampling(max_new_tokens=40, batch_size=6)  # groups join when others have ended
    groups = sample(policy, [*PROMPTS, PROMPTS[0][:6]], 4, settings, eos_id=2, seeds=[0, 1, 2])
    prompts = [prompt for prompt in [*PROMPTS, PROMPTS[0][:6]] for _ in range(4)]
    completions = [completion for group in groups for completion in group]
    tokens = [completion.tokens for completion in completions]
    sampler = torch.cat([torch.tensor(completion.logprobs) for completion in completions])

    def difference() -> torch.Tensor:
        table = completion_logprobs(policy, prompts, tokens, 1.0)
        return (torch.cat([row[: len(of)] for row, of in zip(table, tokens, strict=True)]) - sampler).abs()

    with recorded(routers) as calls:
        own = difference()
    told = experts_in_pack(prompts, tokens, [completion.experts for completion in completions], policy.device)
    assert all((of >= 0).all() for of in told)
    # Most tokens have the same experts anyway; if the tokens were mixed up, few would.
    same = [(call[0].experts.sort(1).values == of.sort(1).values).all(1) for call, of in zip(calls, told, strict=True)]
    assert 0.8 < torch.stack(same).all(0).float().mean() < 1
    with replayed(routers, told):
        replay = difference()
    assert replay.max() < own.max() / 2
