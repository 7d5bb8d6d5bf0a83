"""Each token's credit, by method."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from grpo.config.rl import RL
from grpo.data.records import Problem
from grpo.rl.batch import CompletionGroup, TokenStep
from grpo.rl.credit import CREDITS, Credit, CreditInputs, teach_nothing


def credit(name: str, inputs: CreditInputs, **fields) -> Credit:
    base = {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-6}}
    return CREDITS[name](inputs, RL.model_validate({**base, **fields}))


def plain(vectors: list[torch.Tensor]) -> list[list[float]]:
    return [[round(value, 4) for value in vector.tolist()] for vector in vectors]


HENS = CreditInputs(
    rewards=torch.tensor([[1.0, 0.0, 1.0, 0.0]]), correct=[True, False, True, False], lengths=[1, 2, 3, 1]
)


def test_sft_imitates_all_rft_what_is_right():
    assert plain(credit("all", HENS).advantages) == [[1], [1, 1], [1, 1, 1], [1]]
    assert plain(credit("correct", HENS).advantages) == [[1], [0, 0], [1, 1, 1], [0]]


def test_grpo_gives_a_completions_advantage_to_each_of_its_tokens():
    assert plain(credit("group_relative", HENS).advantages) == [[1], [-1, -1], [1, 1, 1], [-1]]
    assert credit("group_relative", HENS).units is None


def test_the_choice_of_advantage_and_std_is_the_recipes():
    # Less the mean of the other three: 1 - 1/3 and 0 - 2/3.
    assert plain(credit("group_relative", HENS, advantage="rloo").advantages)[:2] == [[0.6667], [-0.6667, -0.6667]]
    # Sample std of 1, 0, 1, 0: the root of 1/3, so 0.5 / 0.5774.
    assert plain(credit("group_relative", HENS, std="sample").advantages)[0] == [0.866]


def test_dpo_pairs_the_better_with_the_worse():
    made = credit("preference_pairs", HENS)
    # Among equals the order is the group's: 0 and 2 are right; the worst is the last of the wrong ones.
    assert made.units == [[0, 3], [2, 1]]
    assert plain(made.advantages) == [[0], [0, 0], [0, 0, 0], [0]]


def test_a_step_earns_what_it_and_later_steps_are_worth():
    # Rewards of all steps: 1, 0 and 0, 1: mean 0.5, std 0.5, so +1, -1 and -1, +1.
    inputs = CreditInputs(
        rewards=torch.tensor([[0.0, 1.0]]),
        correct=[False, True],
        lengths=[3, 4],
        steps=[[(0, 1.0), (2, 0.0)], [(1, 0.0), (3, 1.0)]],
    )
    # First: token 0 has both steps before it ends, tokens 1 and 2 only the second. Second: likewise.
    assert plain(credit("group_relative", inputs).advantages) == [[0, -1, -1], [0, 0, 1, 1]]


@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo", "batch_std"])
def test_another_advantage_of_steps_is_refused(advantage: str) -> None:
    with pytest.raises(ValidationError, match=f"needs advantage 'grpo'; it is '{advantage}'"):
        credit("group_relative", HENS, supervision="process", advantage=advantage)


@pytest.mark.parametrize("limits", [{-1: 8}, {2: 0}, {2: -5}])
def test_a_limit_on_length_is_a_number_of_tokens_from_a_step_on(limits: dict[int, int]) -> None:
    with pytest.raises(ValidationError, match="max_new_tokens_from"):
        credit("group_relative", HENS, max_new_tokens_from=limits)


def test_a_group_without_steps_has_an_advantage_a_completion_beside_one_that_has():
    inputs = CreditInputs(
        rewards=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        correct=[True, False, False, True],
        lengths=[2, 1, 3, 4],
        steps=[None, None, [(0, 1.0), (2, 0.0)], [(1, 0.0), (3, 1.0)]],
    )
    # A general prompt: rewards 1 and 0, so +1 and -1. A reasoning problem: as above.
    expected = [[1, 1], [-1], [0, -1, -1], [0, 0, 1, 1]]
    assert plain(credit("group_relative", inputs).advantages) == expected


def scored(rewards: list[float], steps: list[list[TokenStep]] | None = None) -> CompletionGroup:
    problem = Problem("hens", [], "277", "number", "reasoning", "en", "test")
    return CompletionGroup(problem, [1], [], [], [], torch.tensor(rewards), steps, None, None, None)


def test_what_a_group_teaches_is_in_its_steps_where_it_has_some():
    assert teach_nothing(scored([1.0, 1.0])) and not teach_nothing(scored([1.0, 0.0]))
    # Equal outcomes, other steps: worth learning from. No step but the outcome, which is equal: not.
    assert not teach_nothing(scored([1.0, 1.0], [[(0, 0.0), (3, 1.0)], [(0, 1.0), (3, 1.0)]]))
    assert teach_nothing(scored([1.0, 1.0], [[(3, 1.0)], [(2, 1.0)]]))


def test_ppo_pays_the_penalty_in_the_reward():
    # kl_coef 0.5; log pi - log ref is 0.2 on the first token, 0 on the second, which earns the outcome 1 too.
    inputs = CreditInputs(
        rewards=torch.tensor([[1.0]]),
        correct=[True],
        lengths=[2],
        logprobs=[torch.tensor([-1.0, -2.0])],
        ref_logprobs=[torch.tensor([-1.2, -2.0])],
        values=[torch.tensor([0.3, 0.4])],
    )
    made = credit("gae", inputs, kl_coef=0.5, ppo={"whiten": False})
    assert made.returns is not None
    # gamma = lambda = 1: the return is the sum of what is still to come, -0.1 + 1 and 1; less the values.
    assert plain(made.returns) == [[0.9, 1.0]]
    assert plain(made.advantages) == [[0.6, 0.6]]


def test_ppo_without_a_reference_pays_none():
    inputs = CreditInputs(
        rewards=torch.tensor([[1.0]]),
        correct=[True],
        lengths=[2],
        logprobs=[torch.tensor([-1.0, -2.0])],
        values=[torch.zeros(2)],
    )
    assert plain(credit("gae", inputs, kl_coef=0, ppo={"whiten": False}).advantages) == [[1, 1]]


@pytest.mark.parametrize("name", CREDITS)
def test_vectors_are_as_long_as_their_completions(name):
    inputs = CreditInputs(
        rewards=HENS.rewards,
        correct=HENS.correct,
        lengths=HENS.lengths,
        logprobs=[torch.zeros(n) for n in HENS.lengths],
        values=[torch.zeros(n) for n in HENS.lengths],
    )
    assert [len(v) for v in credit(name, inputs).advantages] == HENS.lengths
