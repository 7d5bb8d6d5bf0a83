"""Which problems are asked: every pass a permutation, sources in their proportions, a curriculum, all resumable."""

from __future__ import annotations

from collections import Counter

import pytest

from grpo.config.curriculum import Curriculum
from grpo.config.rl import RL
from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rl.problem_order import ProblemOrder, problems_of_rollout


def problems(count: int, source: str = "sums") -> list[Problem]:
    return [Problem(f"{source}{i}", [], "", "exact", "reasoning", "en", source) for i in range(count)]


def ids(taken: list[Problem]) -> list[str]:
    return [problem.id for problem in taken]


def test_each_pass_is_another_permutation_fixed_by_the_seed():
    order = ProblemOrder(problems(5), seed=0)
    first, second = ids(order.take(5)), ids(order.take(5))
    assert sorted(first) == sorted(second) == ids(problems(5))
    assert first != second
    assert ids(ProblemOrder(problems(5), seed=0).take(10)) == first + second
    assert ids(ProblemOrder(problems(5), seed=1).take(5)) != first


def test_sources_come_in_the_proportion_of_their_weights():
    order = ProblemOrder(problems(100, "maths") + problems(2, "code"), seed=0, weights={"maths": 3, "code": 1})
    for _ in range(3):  # of each four, three are maths, although there is fifty times as much of it
        assert Counter(p.source for p in order.take(4)) == {"maths": 3, "code": 1}


def test_a_source_without_problems_is_named():
    with pytest.raises(InputError, match=r"no problems of source 'cod'; sources here: code, maths"):
        ProblemOrder(problems(1, "maths") + problems(1, "code"), seed=0, weights={"maths": 1, "cod": 1})


def test_what_is_always_solved_rests_for_two_passes():
    order = ProblemOrder(problems(3), seed=0, curriculum=Curriculum(rest=2))
    first = order.take(3)
    for problem in first:
        order.observe(problem, 1.0 if problem.id == "sums1" else 0.5)
    assert [sorted(ids(order.take(n))) for n in (2, 2)] == [["sums0", "sums2"]] * 2
    assert sorted(ids(order.take(3))) == ids(problems(3))


@pytest.mark.parametrize("count", [5, 6, 8])
def test_the_rest_begins_after_the_pass_in_which_a_problem_was_last_asked(count: int) -> None:
    """A rollout that ends before the first pass of six does, with it, or with two problems of the second."""
    order = ProblemOrder(problems(6), seed=0, curriculum=Curriculum(rest=2))
    taken = order.take(count)
    for problem in taken:
        order.observe(problem, 1.0)
    # Those of pass 0 rest in passes 1 and 2, those that pass 1 asked again in 2 and 3.
    assert order.resting == {**dict.fromkeys(ids(taken[:6]), 3), **dict.fromkeys(ids(taken[6:]), 4)}


def test_what_is_never_solved_rests_too_and_between_the_limits_nothing_does():
    order = ProblemOrder(problems(2), seed=0, curriculum=Curriculum(min_pass_rate=0.25, max_pass_rate=0.75, rest=1))
    easy, hard = order.take(2)
    order.observe(easy, 0.5)
    order.observe(hard, 0.25)
    assert ids(order.take(1)) == [easy.id]


def test_where_all_rest_one_is_asked_all_the_same():
    order = ProblemOrder(problems(2), seed=0, curriculum=Curriculum(rest=9))
    for problem in order.take(2):
        order.observe(problem, 0.0)
    assert len(order.take(3)) == 3


def test_a_restored_order_goes_on_where_the_other_stood():
    def make() -> ProblemOrder:
        sources = problems(5, "maths") + problems(4, "code")
        return ProblemOrder(sources, seed=3, weights={"maths": 2, "code": 1}, curriculum=Curriculum())

    order = make()
    for problem in order.take(7):
        order.observe(problem, 0.0 if problem.id.endswith("1") else 0.5)
    other = make()
    unseen = order.take(3)
    other.restore(order.state())
    for each in (order, other):
        for problem in unseen:
            each.observe(problem, 1.0)
    assert ids(other.take(20)) == ids(order.take(20))
    older = {name: of for name, of in order.state().items() if name != "asked"}  # an earlier version's
    make().restore(older)


@pytest.mark.parametrize(
    ("minibatches", "inner_epochs", "last_steps", "expected"),
    [
        (2, 1, 3, [0, 0, 1, 2]),  # updates 0-1, 2-3, 4-5, 6-7, of which 5 to 7 are the last three
        (1, 4, 3, [0, 1]),  # updates 0-3 and 4-7, all of a rollout with its one minibatch
        (2, 2, 3, [0, 2]),  # three of four updates, which are three halves of a minibatch's two
        (2, 2, 2, [0, 1]),
    ],
)
def test_general_prompts_join_in_the_last_updates_also_with_inner_epochs(
    minibatches: int, inner_epochs: int, last_steps: int, expected: list[int]
) -> None:
    settings = RL.model_validate(
        {
            "steps": 8,
            "minibatches": minibatches,
            "inner_epochs": inner_epochs,
            "prompts_per_step": 4,
            "general_last_steps": last_steps,
            "general_share": 0.5,
            "sampling": {"max_new_tokens": 8},
            "optimizer": {"learning_rate": 1e-6},
        }
    )
    orders = {
        "reasoning": ProblemOrder(problems(50), seed=0),
        "general": ProblemOrder(problems(50, "general"), seed=0),
    }
    found = []
    for step in range(0, 8, minibatches * inner_epochs):
        taken = problems_of_rollout(orders, settings, step, minibatches)
        assert len(taken) == 4 * minibatches
        found.append(sum(problem.source == "general" for problem in taken) // 2)
    assert found == expected
