"""An update on a rollout whose log-probabilities are all -2: what it leaves out, and what its statistics average."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.config.rl import RL
from grpo.distributed.process_group import Parallel
from grpo.rl.batch import Rollout
from grpo.rl.method_table import method_of
from grpo.rl.model_set import Models
from grpo.rl.update import Update


class Policy(torch.nn.Module):
    """Log-probabilities of -2, to all of which the weight is added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, function: Any, prompts: list[list[int]], completions: list[list[int]], _: float) -> Tensor:
        return torch.full((len(completions), max(map(len, completions))), -2.0) + self.weight


def update(rollout: Rollout, **fields: Any) -> tuple[dict[str, float], float]:
    """Metrics, and the gradient's norm, of one update on all units of a rollout."""
    base = {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 0.1, "max_grad_norm": 1e9}}
    settings, policy = RL.model_validate({**base, **fields}), Policy()
    groups = [{"params": [policy.weight], "lr": 0.1}]
    models: Any = SimpleNamespace(policy=policy, value=None, version=0, routers=[], parameter_groups=lambda: groups)
    run = Update(settings, method_of(settings), models, Parallel.alone(torch.device("cpu")))
    stats = run(rollout, range(len(rollout.units)), 0)
    return stats, stats["grad_norm"]


def rollout(advantages: list[float], lengths: list[int], **fields: Any) -> Rollout:
    def each(value: float) -> list[Tensor]:
        return [torch.full((length,), value) for length in lengths]

    rows = range(len(lengths))
    values: dict[str, Any] = {
        "prompts": [[1] for _ in rows],
        "completions": [[*range(length)] for length in lengths],
        "advantages": [torch.full((n,), a) for n, a in zip(lengths, advantages, strict=True)],
        "old_logprobs": each(-2.0),
        "ref_logprobs": each(-3.0),
        "sampler_logprobs": each(-2.5),
        "old_values": None,
        "returns": None,
        "learnt": [True for _ in rows],
        "units": [[row] for row in rows],
        "metrics": {},
    }
    return Rollout(**(values | fields))


@pytest.mark.parametrize("kl_coef", [0.001, 0.0])
def test_statistics_are_means_over_computed_tokens(kl_coef: float) -> None:
    """Without a KL penalty, three of four completions have no gradient and are not computed."""
    stats, _ = update(rollout([1.0, 0.0, 0.0, 0.0], [2, 4, 4, 6]), kl_coef=kl_coef)
    assert stats["sampled_entropy"] == pytest.approx(2.0)
    assert stats["sampler_difference"] == pytest.approx(0.5)
    assert stats["kl"] == pytest.approx(math.exp(-1))  # k3 with log x = -1: e^-1 - (-1) - 1


def test_a_loss_divides_by_all_completions_also_by_those_that_are_not_computed() -> None:
    none = {"kl_coef": 0.0, "sampler_ratio_max": 1.0}
    for skipped, norm in (([], 1.0), ([0.0, 0.0, 0.0], 0.25)):
        given = rollout([1.0, *skipped], [2] * (1 + len(skipped)), sampler_logprobs=None)
        assert update(given, **none)[1] == pytest.approx(norm)  # the ratio is 1, its gradient the advantage


def test_dr_grpo_divides_by_the_limit_that_the_rollout_was_sampled_under() -> None:
    """Two tokens of advantage 1 have a gradient of 2, divided by the limit: 8 when sampled, 16 at this step."""
    dr_grpo = {"objective": "dr_grpo", "kl_coef": 0.0, "max_new_tokens_from": {0: 16}}
    given = rollout([1.0], [2], sampler_logprobs=None)
    assert update(given, **dr_grpo)[1] == pytest.approx(2 / 16)  # of an earlier version's checkpoint
    given.max_new_tokens = 8
    assert update(given, **dr_grpo)[1] == pytest.approx(2 / 8)


def test_a_pair_of_which_one_side_is_masked_teaches_nothing() -> None:
    """A whole pair has the margin beta * (4 - 2) = 1, so a loss of -log sigma(1) and a gradient of sigma(-1)."""
    pairs = {"units": [[0, 1], [2, 3]], "sampler_logprobs": None}
    dpo = {"method": "dpo", "dpo": {"beta": 0.5}}
    lengths = [4, 2, 4, 2]
    stats, norm = update(rollout([0.0] * 4, lengths, **pairs), **dpo)
    assert (stats["loss"], norm) == (pytest.approx(0.313262, abs=1e-5), pytest.approx(0.268941, abs=1e-5))
    cut_off = rollout([0.0] * 4, lengths, learnt=[True, True, True, False], **pairs)
    assert update(cut_off, **dpo) == (stats, pytest.approx(norm))
    masked = rollout([0.0] * 4, lengths, learnt=[True, False, True, False], **pairs)
    assert update(masked, **dpo)[1] == 0


@pytest.mark.parametrize(("checkpointing", "passes"), [(False, 1), (True, 2)])
def test_the_value_model_recomputes_activations_as_the_policy_does(
    checkpointing: bool, passes: int, model_folder: str
) -> None:
    fields = {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 0.1}, "method": "ppo"}
    hardware = {"device": "cpu", "gradient_checkpointing": checkpointing}
    settings = RL.model_validate({**fields, "hardware": hardware, "kl_coef": 0})
    alone = Parallel.alone(torch.device("cpu"))
    models = Models(model_folder, settings, method_of(settings), alone)
    assert models.value is not None
    calls = {"policy": 0, "value": 0}

    def counted(name: str) -> Any:
        def count(*_: Any) -> None:
            calls[name] += 1

        return count

    for name, model in (("policy", models.policy), ("value", models.value)):
        block = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer")
        block.register_forward_pre_hook(counted(name))
    of_values = {"old_values": [torch.zeros(2)], "returns": [torch.ones(2)], "sampler_logprobs": None}
    Update(settings, method_of(settings), models, alone)(rollout([1.0], [2], **of_values), [0], 0)
    assert calls == {"policy": passes, "value": passes}
    assert not any(module.training for module in models.value.modules())
