"""Health on made records in which a reader can count the step, and on a recorded run, which is quiet."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain, repeat

import pytest
from pydantic import BaseModel, ValidationError

from grpo.health.checks import CHECKS, Health, HealthSettings

NAN, INF = float("nan"), float("inf")


def findings(records, health=None, first_step=1):
    health = health or Health(HealthSettings())
    return [f for step, record in enumerate(records, first_step) for f in health.check(step, record)]


def said(records, **settings):
    """(step, name) of each finding; steps count from 1."""
    return [(f.step, f.name) for f in findings(records, Health(HealthSettings(**settings)))]


def series(*parts, name):
    """series((3, 0.5), (1, 2.0), name="kl"): three records with kl 0.5, then one with 2.0."""
    return [{name: value} for count, value in parts for _ in range(count)]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "reward", "kl"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_said_at_once(name, value):
    assert said(series((2, 0.5), (1, value), name=name)) == [(3, "not_finite")]


def test_a_value_that_is_not_finite_rolls_back_and_is_named():
    (finding,) = findings([{"loss": NAN, "grad_norm": INF, "reward": 1.0}])
    assert finding.action == "roll_back"
    assert finding.message.startswith("step 1: loss is nan, grad_norm is inf (must be finite); ")


def test_nan_enters_no_window():
    # Ten rewards of 2 around the NaN: the best mean is 2, and ten further ones leave it there.
    records = series((5, 2.0), (1, NAN), (15, 2.0), name="reward")
    assert said(records) == [(6, "not_finite")]
    health = Health(HealthSettings())
    findings(records, health)
    assert health.states["reward_collapse"].best == 2


def test_groups_without_variance_are_said_after_ten_steps():
    assert said(series((3, 0.5), (20, 0.9), name="zero_variance_share")) == [(13, "variance_collapse")]


def test_groups_with_some_variance_are_not():
    assert said(series((50, 0.89), name="zero_variance_share")) == []
    # Nine, one good step, nine.
    assert said(series((9, 1.0), (1, 0.89), (9, 1.0), name="zero_variance_share")) == []


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (1.0, 1.9, "mean reward rose from 1 to 1.9: nearly all right"),
        (1.0, 0.8, "mean reward fell from 1 to 0.8: nearly all wrong"),
        (1.0, 1.05, "mean reward 1.05 is what it was at the start: the problems are too easy or too hard"),
    ],
)
def test_the_reward_tells_why_groups_have_no_variance(before, now, words):
    records = [{"zero_variance_share": 0.2, "reward": before}] * 10 + [{"zero_variance_share": 1.0, "reward": now}] * 10
    (finding,) = findings(records)
    assert (finding.step, finding.action) == (20, "warn")
    assert f"100% of groups have equal rewards (limit 90%), so that they teach nothing; {words}" in finding.message


def test_kl_is_said_after_five_steps_above_its_limit():
    assert said(series((10, 0.2), (20, 1.1), name="kl")) == [(15, "kl_blow_up")]


def test_kl_at_its_limit_or_for_four_steps_is_not():
    assert said(series((50, 1.0), name="kl")) == []
    assert said(series((4, 8.0), (1, 1.0), (4, 8.0), name="kl")) == []


def test_the_message_has_step_number_limit_and_remedy_in_one_line():
    (finding,) = findings(series((5, 1.25), name="kl"))
    assert finding.message == (
        "step 5: KL to the reference is 1.25 nats a token (limit 1), 5 times in a row; "
        "lower the learning rate or raise kl_coef"
    )


def test_stale_sampler_weights_stop_the_run():
    # The figures of TRL issue 5312. Smallest of the first five is 0.010, limit max(5 * 0.010, 0.1) = 0.1.
    records = series((1, 0.010), (1, 0.018), (10, 0.201), name="logprob_mismatch")
    (finding,) = findings(records)
    assert (finding.step, finding.name, finding.action) == (5, "mismatch_growth", "stop")
    assert "by up to 0.201 nats (limit 0.1, at the start 0.01)" in finding.message


def test_mismatch_is_measured_against_the_smallest_of_the_first_five():
    # 5 * 0.25 = 1.25, passed three times from step 7 on.
    early = [(1, 0.5), (1, 0.25), (4, 0.5)]
    assert said(series(*early, (9, 1.26), name="logprob_mismatch")) == [(9, "mismatch_growth")]
    assert said(series(*early, (9, 1.25), name="logprob_mismatch")) == []
    assert said(series(*early, (2, 9.0), (1, 1.25), (2, 9.0), name="logprob_mismatch")) == []


def test_a_mismatch_the_size_of_rounding_may_grow():
    assert said(series((5, 1e-5), (20, 0.1), name="logprob_mismatch")) == []


def test_steps_without_the_metric_neither_count_nor_interrupt():
    # As with four minibatches a rollout: measured at steps 1, 5, 9, 13, ...; bad from step 9 on, third time at 17.
    measured = [0.01, 0.01, 0.5, 0.5, 0.5, 0.5]
    records = list(chain.from_iterable([{"logprob_mismatch": value}, {}, {}, {}] for value in measured))
    assert said(records) == [(17, "mismatch_growth")]


def lengths(*parts):
    return [{"completion_tokens": t, "truncated_share": c} for count, t, c in parts for _ in range(count)]


def test_length_that_doubles_while_more_is_cut_off_is_said_after_five_steps():
    # Usual: 100 tokens, 1/16 cut off. Limits: 2 * 100 = 200 tokens and 1/16 + 0.1 = 0.1625.
    (finding,) = findings(lengths((20, 100, 0.0625), (5, 201, 0.1875)))
    assert (finding.step, finding.name) == (25, "length_explosion")
    assert "mean length is 201 tokens (limit 200 where over 16% are cut off)" in finding.message


def test_length_alone_or_truncation_alone_is_no_explosion():
    assert said(lengths((20, 100, 0.0625), (30, 200, 0.1875))) == []
    assert said(lengths((20, 100, 0.0625), (9, 300, 0.0625 + 0.1))) == []
    assert said(lengths((20, 100, 0.0625), (4, 300, 0.4), (1, 100, 0.0625))) == []
    assert said(lengths((19, 100, 0.0625), (1, 300, 0.4))) == []


def test_completions_that_are_mostly_cut_off_are_bad_at_any_length():
    assert said(series((10, 0.5), name="truncated_share")) == [(5, "length_explosion")]
    assert said(series((50, 0.49), name="truncated_share")) == []
    (finding,) = findings(lengths((5, 80, 0.75)))
    assert finding.message.startswith("step 5: 75% of completions are cut off (limit 50%), 5 times in a row")


@pytest.mark.parametrize("name", ["entropy", "sampled_entropy"])
def test_entropy_under_a_twentieth_of_its_start_is_said_after_ten_steps(name):
    # 0.05 * 2 = 0.1.
    assert said(series((10, 2.0), (10, 0.09), name=name)) == [(20, "entropy_collapse")]
    assert said(series((10, 2.0), (50, 0.1), name=name)) == []
    assert said(series((10, 2.0), (9, 0.09), (1, 0.1), (9, 0.09), name=name)) == []


def test_little_entropy_at_the_start_has_an_absolute_floor():
    # 0.05 * 0.01 = 0.0005 is below the floor of 0.002.
    assert said(series((10, 0.01), (10, 0.0019), name="entropy")) == [(20, "entropy_collapse")]
    assert said(series((10, 0.01), (50, 0.002), name="entropy")) == []


def test_a_mean_reward_that_falls_by_a_third_of_its_best_is_said():
    # Mean of ten after k zeros: 2 - 0.2 k. Limit 2 - 0.3 * 2 = 1.4: passed by the fourth zero.
    (finding,) = findings(series((12, 2.0), (10, 0.0), name="reward"))
    assert (finding.step, finding.name) == (16, "reward_collapse")
    assert "mean reward of 10 steps fell to 1.2 (limit 1.4, best 2)" in finding.message


def test_a_smaller_fall_or_one_at_the_very_beginning_is_not():
    assert said(series((12, 2.0), (3, 0.0), (20, 2.0), name="reward")) == []
    assert said(series((4, 2.0), (6, 0.0), name="reward")) == []  # the first mean of ten is the best so far


def test_negative_rewards_fall_by_a_share_of_their_size():
    # Mean after k: -1 - 0.1 k. Limit -1 - 0.3 * 1 = -1.3: passed by the fourth.
    assert said(series((10, -1.0), (10, -2.0), name="reward")) == [(14, "reward_collapse")]


def test_a_tiny_reward_may_be_lost():
    # From 0.09 to 0: all of it, but less than 0.1.
    assert said(series((10, 0.09), (20, 0.0), name="reward")) == []


def test_a_gradient_norm_ten_times_the_usual_is_said_at_once():
    (finding,) = findings(series((20, 0.5), (1, 5.1), (10, 0.5), name="grad_norm"))
    assert (finding.step, finding.name) == (21, "gradient_spike")
    assert "gradient norm is 5.1 (limit 5, usually 0.5)" in finding.message


def test_a_smaller_norm_or_an_early_one_is_no_spike():
    assert said(series((20, 0.5), (1, 5.0), name="grad_norm")) == []
    assert said(series((19, 0.5), (1, 50.0), name="grad_norm")) == []  # the window is not full before step 21
    assert said(series((20, 0.01), (1, 1.0), name="grad_norm")) == []  # a hundredfold, but not above 1


def test_a_spike_does_not_change_what_is_usual():
    records = series((20, 0.5), (1, 50.0), (6, 0.5), (1, 5.1), name="grad_norm")
    assert said(records) == [(21, "gradient_spike"), (28, "gradient_spike")]


def test_a_lasting_failure_is_said_once():
    assert said(series((100, 3.0), name="kl")) == [(5, "kl_blow_up")]


def test_a_failure_is_said_again_after_it_has_ended():
    # Ended by the five good steps 11 to 15, bad again from 16 on: the fifth is step 20.
    assert said(series((10, 3.0), (5, 0.1), (10, 3.0), name="kl")) == [(5, "kl_blow_up"), (20, "kl_blow_up")]


def test_four_good_steps_do_not_end_a_failure():
    assert said(series((10, 3.0), (4, 0.1), (10, 3.0), name="kl")) == [(5, "kl_blow_up")]


def test_the_limits_of_a_failure_can_be_set():
    settings = {"kl_blow_up": {"action": "stop", "limit": 0.5, "steps": 2}, "recovery_steps": 1}
    records = series((2, 0.6), (1, 0.5), (2, 0.6), name="kl")
    assert [(f.step, f.action) for f in findings(records, Health(HealthSettings(**settings)))] == [
        (2, "stop"),
        (5, "stop"),
    ]


# The guards that wait for a limit get one.
LIMITS = {"kl_budget": {"limit": 5.0}, "rule_accuracy": {"points": 5.0, "window": 4}}


def guarded(**settings):
    return Health(HealthSettings(**{name: LIMITS.get(name, {}) | settings.get(name, {}) for name in CHECKS}))


# A sequence for each failure that makes its finding and no other's.
MAKES = {
    "not_finite": series((3, 1.0), (3, NAN), (6, 1.0), (2, INF), name="loss"),
    "variance_collapse": series((12, 1.0), (6, 0.0), (12, 1.0), name="zero_variance_share"),
    "kl_blow_up": series((7, 2.0), (6, 0.0), (7, 2.0), name="kl"),
    "mismatch_growth": series((6, 0.1), (5, 2.0), (6, 0.1), (5, 2.0), name="logprob_mismatch"),
    "length_explosion": lengths((20, 10, 0.0), (6, 50, 0.25), (20, 10, 0.0), (6, 50, 0.25)),
    "entropy_collapse": series((10, 1.0), (12, 0.01), (6, 1.0), (12, 0.01), name="entropy"),
    "reward_collapse": series((10, 2.0), (10, 0.0), (20, 2.0), (10, 0.0), name="reward"),
    "gradient_spike": series((20, 1.0), (1, 20.0), (6, 1.0), (1, 20.0), name="grad_norm"),
    "kl_budget": series((4, 5.1), (6, 5.0), (4, 5.1), name="kl_completion"),
    "rule_accuracy": series((4, 0.5), (4, 0.375), (12, 0.5), (4, 0.375), name="reward_accuracy"),
}


@pytest.mark.parametrize("name", MAKES)
def test_checking_goes_on_the_same_from_a_state_kept_at_any_step(name):
    whole = findings(MAKES[name], guarded())
    assert [f.name for f in whole] == [name, name]
    for cut in range(len(MAKES[name]) + 1):
        first, second = guarded(), guarded()
        before = findings(MAKES[name][:cut], first)
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert before + findings(MAKES[name][cut:], second, cut + 1) == whole


def test_a_state_can_be_returned_to_more_than_once():
    health = Health(HealthSettings())
    findings(MAKES["reward_collapse"][:12], health)
    state = health.state()
    kept = json.dumps(state)
    runs = []
    for _ in range(2):
        health.restore(state)
        runs.append(findings(MAKES["reward_collapse"][12:], health, 13))
    assert runs[0] == runs[1] != []
    assert json.dumps(state) == kept


def test_a_kept_state_does_not_move_with_later_steps():
    health = Health(HealthSettings())
    findings(series((5, 1.0), name="entropy"), health)
    state = health.state()
    kept = json.dumps(state)
    findings(series((5, 0.5), name="entropy"), health, 6)  # still among the first ten, which make the baseline
    assert json.dumps(state) == kept


@pytest.mark.parametrize("name", MAKES)
def test_what_is_ignored_is_not_said(name):
    assert findings(MAKES[name], guarded(**{name: {"action": "ignore"}})) == []


@pytest.mark.parametrize("name", MAKES)
def test_what_is_ignored_hides_nothing_else(name):
    # All sequences at once, each metric of its own; the shorter ones end.
    records = [{} for _ in range(max(map(len, MAKES.values())))]
    for made in MAKES.values():
        for record, values in zip(records, made, strict=False):
            record |= values
    names = [f.name for f in findings(records, guarded(**{name: {"action": "ignore"}}))]
    assert sorted(names) == sorted(chain.from_iterable(repeat(n, 2) for n in MAKES if n != name))


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("action", ["warn", "stop", "roll_back"])
def test_each_failure_takes_the_action_it_is_given(name, action):
    found = findings(MAKES[name], guarded(**{name: {"action": action}}))
    assert {f.action for f in found} == {action}
    assert all(f.message.startswith(f"step {f.step}: ") and "\n" not in f.message for f in found)


def test_a_failure_no_longer_ignored_begins_anew():
    ignoring, looking = Health(HealthSettings(kl_blow_up={"action": "ignore"})), Health(HealthSettings())
    findings(series((10, 3.0), name="kl"), ignoring)
    looking.restore(ignoring.state())
    assert [f.step for f in findings(series((10, 3.0), name="kl"), looking, 11)] == [15]


def test_each_check_has_settings_and_each_setting_a_description():
    assert (
        set(HealthSettings.model_fields)
        == {*CHECKS, "max_roll_backs", "recovery_steps"}
        == {
            *MAKES,
            "max_roll_backs",
            "recovery_steps",
        }
    )
    for name, field in HealthSettings.model_fields.items():
        limits = field.annotation.model_fields if issubclass(field.annotation, BaseModel) else {name: field}
        assert all(limit.description for limit in limits.values()), name


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"kl_blowup": {}}, "kl_blowup"),
        ({"kl_blow_up": {"limits": 2.0}}, "kl_blow_up.limits"),
        ({"kl_blow_up": {"action": "halt"}}, "kl_blow_up.action"),
        ({"kl_blow_up": {"limit": 0.0}}, "kl_blow_up.limit"),
        ({"kl_blow_up": {"limit": NAN}}, "kl_blow_up.limit"),
        ({"kl_blow_up": {"steps": 0}}, "kl_blow_up.steps"),
        ({"variance_collapse": {"limit": 1.1}}, "variance_collapse.limit"),
        ({"mismatch_growth": {"factor": 1.0}}, "mismatch_growth.factor"),
        ({"entropy_collapse": {"share": 1.0}}, "entropy_collapse.share"),
        ({"length_explosion": {"steps": 11}}, "length_explosion"),  # twice 11 is more than the window of 20
        ({"gradient_spike": {"window": 2, "steps": 2}}, "gradient_spike"),
        ({"kl_budget": {"limit": 0.0}}, "kl_budget.limit"),
        ({"rule_accuracy": {"points": 101.0}}, "rule_accuracy.points"),
        ({"max_roll_backs": -1}, "max_roll_backs"),
        ({"recovery_steps": 0}, "recovery_steps"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_stands(settings, where):
    with pytest.raises(ValidationError) as caught:
        HealthSettings(**settings)
    assert [".".join(map(str, error["loc"])) for error in caught.value.errors()] == [where]


def test_health_needs_no_torch():
    code = "import sys, grpo.health.checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# A run of R1-Zero with the tiny recipe, step by step, two digits. It learns: the reward rises from 0.02 to 1.7, groups
# without variance fall from 92% to 20%, entropy halves; at one step the KL estimate leaps to 8.4.
RECORDED = {
    "reward": """
        .021 .016 .021 .068 .068 .12 .12 .12 .26 .18 .4 .43 .67 .82 .99 1.2 1.3 1.3 1.4 1.5 1.5 1.4 1.5 1.5 1.6 1.5
        1.6 1.5 1.5 1.6 1.6 1.6 1.5 1.5 1.5 1.6 1.7 1.6 1.5 1.7 1.6 1.6 1.7 1.7 1.6 1.6 1.6 1.6 1.6 1.6 1.7 1.6 1.7
        1.7 1.6 1.6 1.6 1.6 1.6 1.7 1.7 1.7 1.6 1.7 1.5 1.6 1.6 1.6 1.7 1.6 1.6 1.5 1.7 1.6 1.7 1.5 1.7 1.6 1.7 1.6
        1.6 1.7 1.6 1.6 1.7 1.7 1.7 1.6 1.6 1.7 1.6 1.7 1.5 1.6 1.6 1.7 1.7 1.5 1.7 1.7 1.7 1.6 1.7 1.8 1.7 1.8 1.6
        1.7 1.7 1.6 1.7 1.6 1.6 1.7 1.7 1.7 1.8 1.7 1.7 1.7
    """,
    "zero_variance_share": """
        .92 .92 .88 .67 .75 .58 .54 .58 .25 .25 .12 .083 .042 0 0 .042 .083 0 .042 0 .083 .042 .083 0 .083 0 .042 .083
        .12 .12 .083 .12 .17 .042 .083 .042 .21 .17 .12 .12 .12 .12 .29 .21 .17 .083 .083 .25 .083 .12 .17 .12 .12 .17
        .083 .083 .083 .21 .042 .21 .21 .12 .21 .17 .29 .17 .042 .12 .083 .12 .21 .042 .21 .042 .17 .083 .042 .042
        .083 .083 .17 .083 .12 0 .25 .12 .17 .083 .29 .083 .33 .12 .12 .21 .12 .17 .21 .083 .12 .25 .083 .042 .21 .25
        .12 .25 .29 .12 .17 .12 .21 .083 .33 .042 .21 .17 .33 .21 .17 .21
    """,
    "completion_tokens": """
        25 22 24 25 24 25 26 26 28 26 28 27 29 28 28 29 30 32 32 32 32 33 32 33 31 32 35 35 33 34 36 35 34 32 33 35 35
        32 35 31 32 34 35 33 35 36 33 34 38 35 33 35 32 33 35 34 35 36 36 33 33 35 30 33 37 34 33 33 32 36 33 37 32 36
        35 36 34 34 33 31 35 32 32 35 31 32 33 37 35 34 33 32 34 38 37 34 36 34 35 32 35 34 32 32 31 33 37 34 36 33 34
        36 34 37 34 35 32 34 32 34
    """,
    "truncated_share": """
        0 0 0 0 0 0 0 0 0 0 0 0 .0052 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 .0052 0 0 0 0 0 0 .0052 0 0
        0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 .0052 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
        0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
    """,
    "sampled_entropy": """
        .14 .16 .14 .17 .17 .15 .17 .15 .17 .17 .17 .18 .19 .18 .18 .16 .15 .17 .15 .14 .13 .14 .13 .13 .13 .13 .11
        .12 .13 .12 .11 .12 .12 .13 .12 .11 .1 .11 .12 .092 .12 .099 .094 .095 .1 .093 .11 .1 .1 .11 .095 .093 .094
        .097 .097 .1 .11 .09 .11 .095 .092 .098 .095 .098 .1 .097 .1 .11 .092 .088 .094 .1 .092 .096 .092 .1 .094 .1
        .096 .093 .1 .093 .11 .098 .083 .077 .081 .088 .084 .083 .082 .082 .093 .083 .094 .093 .081 .094 .087 .069
        .063 .081 .079 .07 .084 .063 .076 .074 .07 .075 .062 .083 .073 .076 .063 .073 .062 .072 .076 .071
    """,
    "kl": """
        0 .00011 .00025 .00068 .0025 .0031 .0055 .0085 .017 .02 .034 .051 .075 .099 .11 .14 .16 .14 .14 .14 .15 .16
        .17 .12 .13 .13 .11 .11 .14 .12 .12 .12 .13 .14 .13 .11 .12 .14 .12 .13 .14 .11 .11 .11 .11 .11 .12 .11 .1 .14
        .11 .12 .12 .12 .11 .12 .15 .1 .12 .14 .13 8.4 .14 .19 .11 .12 .13 .14 .13 .15 .14 .11 .15 .11 .14 .12 .12 .13
        .13 .14 .12 .13 .16 .12 .14 .13 .15 .12 .15 .14 .14 .15 .14 .13 .2 .15 .14 .22 .15 .14 .12 .13 .16 .16 .18 .14
        .14 .16 .14 .16 .14 .19 .15 .14 .15 .15 .18 .16 .16 .16
    """,
    "grad_norm": """
        .027 .049 .052 .079 .081 .12 .15 .15 .21 .21 .29 .37 .35 .37 .31 .26 .26 .32 .34 .24 .21 .26 .23 .32 .21 .18
        .15 .2 .44 .19 .17 .21 .24 .21 .25 .2 .2 .22 .22 .25 .21 .2 .16 .2 .19 .18 .18 .16 .16 .2 .2 .16 .24 .19 .18
        .17 .21 .15 .19 .19 .16 .39 .23 .15 .16 .19 .22 .19 .21 .19 .2 .22 .23 .18 .21 .19 .2 .18 .27 .29 .18 .19 .21
        .26 .23 .18 .21 .19 .14 .2 .18 .18 .23 .21 .15 .2 .16 .23 .2 .17 .31 .17 .18 .21 .19 .19 .21 .24 .22 .2 .2 .18
        .17 .16 .17 .15 .18 .24 .27 .15
    """,
    "logprob_mismatch": """
        1.2e-5 8.7e-06 9.5e-06 1.5e-5 1e-5 9.1e-06 1.2e-5 1.2e-5 9.9e-06 2.2e-5 2.5e-5 9.5e-06 1.5e-5 1.5e-5 1.3e-5
        1.2e-5 1.9e-5 9.7e-06 1.5e-5 1.6e-5 1.4e-5 1.8e-5 2.5e-5 1.4e-5 1.5e-5 1.1e-5 9.7e-06 1.5e-5 1.5e-5 7.2e-06
        1.3e-5 1.1e-5 1e-5 1.1e-5 1.3e-5 1.2e-5 1.1e-5 1.5e-5 1.2e-5 1e-5 7.6e-06 8.6e-06 1.6e-5 1.4e-5 8.3e-06
        9.1e-06 8.6e-06 1.2e-5 8.6e-06 7.9e-06 8.6e-06 1.3e-5 1.6e-5 1.3e-5 1.1e-5 1.2e-5 8.6e-06 1.1e-5 1.4e-5 1.4e-5
        1.4e-5 7.9e-06 1.6e-5 1.2e-5 1.8e-5 1.1e-5 1.4e-5 1.7e-5 2.1e-5 1.5e-5 1e-5 1.6e-5 9.1e-06 1.1e-5 2.1e-5
        7.6e-06 9.5e-06 1.5e-5 1.6e-5 2.1e-5 1.4e-5 1.6e-5 1e-5 1.4e-5 9.7e-06 9.3e-06 6.7e-06 1.3e-5 2.1e-5 7.6e-06
        8.3e-06 7.4e-06 9.8e-06 1.6e-5 8.8e-06 1.5e-5 1.3e-5 1.1e-5 1.2e-5 9.5e-06 2.7e-5 1.8e-5 9.1e-06 9.3e-06
        2.9e-5 2.6e-5 1.4e-5 2.5e-5 1.5e-5 1.3e-5 2.6e-5 4.2e-5 1.7e-5 1.2e-5 9.3e-06 9.1e-06 1.7e-5 1e-5 1.1e-5
        8.1e-06
    """,
}


def recorded():
    columns = {name: [float(value) for value in text.split()] for name, text in RECORDED.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_a_healthy_run_is_quiet():
    assert len(recorded()) == 120
    assert max(record["kl"] for record in recorded()) == 8.4
    assert said(recorded()) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kl": 1.5}, (105, "kl_blow_up")),
        ({"sampled_entropy": 0.001}, (110, "entropy_collapse")),
        ({"zero_variance_share": 1.0}, (110, "variance_collapse")),
        ({"logprob_mismatch": 0.3}, (103, "mismatch_growth")),
        ({"truncated_share": 0.6}, (105, "length_explosion")),
        ({"grad_norm": 9.0}, (101, "gradient_spike")),
        ({"loss": NAN}, (101, "not_finite")),
        # Best mean of ten 1.65, limit 0.7 * 1.65 = 1.155; the last seven rewards sum to 11.5: 11.5 / 10 = 1.15.
        ({"reward": 0.0}, (103, "reward_collapse")),
    ],
)
def test_the_same_run_with_a_failure_from_step_101_on_is_not(changed, expected):
    records = [record | changed if step > 100 else record for step, record in enumerate(recorded(), 1)]
    assert said(records) == [expected]
