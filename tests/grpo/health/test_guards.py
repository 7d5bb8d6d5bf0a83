"""Guards against reward hacking, on numbers that can be followed by hand and in jobs as they are run."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from grpo.config.common import Sampling
from grpo.config.rl import RL as Settings
from grpo.data.completions import Completion
from grpo.data.records import Problem
from grpo.health.checks import Health, HealthSettings
from grpo.rl.batch import CompletionGroup
from grpo.rl.method_table import METHODS
from grpo.rl.metrics import kl_of
from tests.support.job_runner import RL, metrics, result, run, write_job


def said(name, values, **settings):
    """(step, message) of what is said of a metric's values, one a step."""
    health = Health(HealthSettings(**settings))
    findings = [f for step, value in enumerate(values, 1) for f in health.check(step, {name: value})]
    return [(f.step, f.message) for f in findings]


def group(ratios):
    """Completions of two tokens, whose log pi - log pi_ref are given."""
    return CompletionGroup(
        problem=Problem("a", [], "", "none", "general", "en", "test"),
        prompt=[1],
        completions=[Completion([5, 6], [-1.0, -2.0], True) for _ in ratios],
        responses=[],
        breakdowns=[{} for _ in ratios],
        rewards=torch.zeros(len(ratios)),
        steps=None,
        ref_logprobs=[torch.tensor([-1.0 - a, -2.0 - b]) for a, b in ratios],
        old_logprobs=None,
        values=None,
    )


def test_kl_of_a_completion_is_the_sum_over_its_tokens():
    # 0.5 + 1 = 1.5 and 0 - 0.5 = -0.5 nats: mean 0.5.
    assert kl_of([group([(0.5, 1.0), (0.0, -0.5)])]) == {"kl_completion": pytest.approx(0.5)}
    # Another group with 2 and 2: mean of four 1.25.
    groups = [group([(0.5, 1.0), (0.0, -0.5)]), group([(1.0, 1.0), (2.0, 0.0)])]
    assert kl_of(groups)["kl_completion"] == pytest.approx(1.25)


def test_without_a_reference_there_is_no_kl():
    without = group([(0.0, 0.0)])
    without.ref_logprobs = None
    assert kl_of([without]) == {}


def test_a_budget_is_spent_after_three_steps_above_it():
    assert said("kl_completion", [4.0, 8.1, 8.1, 8.0, 8.1, 8.1, 8.1], kl_budget={"limit": 8.0}) == [
        (
            7,
            "step 7: KL to the reference is 8.1 nats a completion (budget 8), 3 times in a row; end here or raise "
            "kl_coef: reward models only guess about responses unlike those they learnt from",
        )
    ]


def test_without_limits_the_guards_are_silent():
    assert said("kl_completion", [1e6] * 50) == []
    assert said("reward_accuracy", [1.0] * 20 + [0.0] * 20) == []


def test_a_fall_of_accuracy_is_measured_against_the_first_steps():
    # Start: (0.75 + 0.25) / 2 = 50%. Moving means of two: 75%, 62.5%, 43.75%: 6.25 points lower, at the sixth step.
    values = [0.75, 0.25, 0.75, 0.75, 0.5, 0.375]
    (only,) = said("reward_accuracy", values, rule_accuracy={"points": 6.0, "window": 2})
    assert only == (
        6,
        "step 6: reasoning accuracy, mean of 2 steps, is 43.8%, at the start 50.0%: 6.2 points lower (allowed 6); ask "
        "fewer general prompts, or for fewer steps, or weigh the preference branch less",
    )
    assert said("reward_accuracy", values, rule_accuracy={"points": 6.25, "window": 2}) == []


def test_accuracy_is_not_judged_before_the_window_is_full():
    assert said("reward_accuracy", [0.5, 0.0], rule_accuracy={"points": 1.0, "window": 3}) == []
    assert [step for step, _ in said("reward_accuracy", [0.5] * 3 + [0.0], rule_accuracy={"points": 1.0, "window": 3})]


def test_steps_with_general_prompts_only_leave_accuracy_as_it_was():
    health = Health(HealthSettings(rule_accuracy={"points": 5.0, "window": 1}))
    records = [{"reward_accuracy": 0.5}, {"reward": 3.0}, {"reward": 3.0}, {"reward_accuracy": 0.4}]
    assert [f.step for step, record in enumerate(records, 1) for f in health.check(step, record)] == [4]


def settings(**fields):
    given = {"steps": 4, "sampling": Sampling(max_new_tokens=8), "optimizer": {"learning_rate": 0.001}}
    return Settings(**{**given, **fields})


def test_a_budget_keeps_a_reference_where_the_loss_needs_none():
    grpo = METHODS["grpo"]
    assert not grpo.reads_reference(settings(kl_coef=0))
    assert grpo.reads_reference(settings(kl_coef=0, health={"kl_budget": {"limit": 5.0}}))
    assert not METHODS["online_rft"].reads_reference(settings())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rewards": {"format": 1}, "health": {"rule_accuracy": {"points": 5.0}}}, "needs accuracy in rewards"),
        (
            {"general_last_steps": 4, "general_share": 1.0, "health": {"rule_accuracy": {"points": 5.0}}},
            "needs reasoning prompts",
        ),
        ({"method": "sft", "health": {"rule_accuracy": {"points": 5.0}}}, "needs sampled completions"),
        (
            {"method": "dpo", "dpo": {"files": ["pairs.jsonl"]}, "health": {"rule_accuracy": {"points": 5.0}}},
            "needs sampled completions",
        ),
        *(
            ({"method": method, "health": {"kl_budget": {"limit": 5.0}}}, f"'{method}' measures no KL, so leave it out")
            for method in ("online_rft", "rft", "dpo", "sft")
        ),
    ],
)
def test_a_guard_that_could_see_nothing_is_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        settings(**fields)


@pytest.mark.system
def test_a_spent_budget_ends_a_run_that_has_no_kl_penalty(rl_fields, tmp_path):
    guard = {"kl_budget": {"limit": 1e-6, "steps": 1, "action": "stop"}}
    fast = {"steps": 20, "kl_coef": 0, "optimizer": {"learning_rate": 0.01}, "health": guard}
    done = run(write_job(tmp_path, "rl", **{**rl_fields, "settings": {**RL, **fast}}), expected=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: training stopped: kl_budget: step ") and "(budget 1e-06)" in last
    records = metrics(tmp_path)
    assert records[0]["kl_completion"] == pytest.approx(0, abs=1e-4)  # the policy is still its reference
    assert records[-1]["kl_completion"] > 1e-6 and len(records) < 20


@pytest.mark.system
def test_what_a_guard_says_stands_in_the_result(rl_fields, tmp_path):
    # An accuracy that can hardly rise for ever, watched for the least fall.
    guard = {"rule_accuracy": {"points": 0.001, "window": 1}}
    more = {"steps": 8, "minibatches": 1, "health": guard}
    run(write_job(tmp_path, "rl", **{**rl_fields, "settings": {**RL, **more}}))
    accuracy = [record["reward_accuracy"] for record in metrics(tmp_path)]
    fallen = [step for step, value in enumerate(accuracy, 1) if value < accuracy[0]]
    (finding, *_) = [f for f in result(tmp_path)["findings"] if f["name"] == "rule_accuracy"]
    assert finding["step"] == fallen[0]
    assert f"at the start {accuracy[0]:.1%}" in finding["message"]
