"""The study of the papers' claims without a run: statistics by hand, the design, what is run next, the page."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def test_the_tail_of_the_interval_by_hand() -> None:
    from paper_claims_statistics import tail

    # Student's t for 9 degrees of freedom is 2.262; sqrt(10 / 9) * 2.262 = 2.384; Phi(-2.384) = 0.0086
    assert tail(10, 0.95) == pytest.approx(0.00856, abs=5e-5)
    assert tail(10_000, 0.95) == pytest.approx(0.025, abs=1e-4)  # with many pairs, the plain percentile interval


def test_the_interval_of_equal_differences_is_their_value() -> None:
    from paper_claims_statistics import paired_interval

    assert paired_interval([0.5] * 10) == (0.5, 0.5)
    with pytest.raises(ValueError, match="two pairs or more, not 1"):
        paired_interval([0.5])


def test_the_interval_of_two_values_has_the_means_of_their_resamples() -> None:
    from paper_claims_statistics import paired_interval

    # Of two pairs 0 and 1, resamples have the means 0, 1/2, 1 with the probabilities 1/4, 1/2, 1/4.
    assert paired_interval([0.0, 1.0]) == (0.0, 1.0)
    # At level 0.05 the tail is Phi(-sqrt(2) * 0.0787) = 0.456: between 1/4 and 3/4 all means are 1/2.
    assert paired_interval([0.0, 1.0], level=0.05) == (0.5, 0.5)


def test_the_interval_is_as_wide_as_that_of_the_t_test() -> None:
    from paper_claims_statistics import paired_interval

    values = [-1.0, 0.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    low, high = paired_interval(values)
    half = 2.262 * statistics.stdev(values) / 10**0.5
    assert low == pytest.approx(3.0 - half, abs=0.15) and high == pytest.approx(3.0 + half, abs=0.15)


@pytest.mark.parametrize(
    ("expect", "low", "high", "verdict"),
    [
        ("higher", 0.01, 0.05, "holds"),
        ("higher", 0.001, 0.01, "holds"),
        ("higher", -0.01, 0.05, "undecided"),
        ("higher", -0.01, 0.019, "does not hold here"),
        ("higher", -0.05, -0.01, "does not hold here"),
        ("at_most", -0.01, 0.019, "holds"),
        ("at_most", 0.01, 0.05, "undecided"),
        ("at_most", 0.03, 0.05, "does not hold here"),
    ],
)
def test_the_rule_of_decision(expect: Any, low: float, high: float, verdict: str) -> None:
    from paper_claims_statistics import verdict as decide

    assert decide(expect, 0.02, low, high) == verdict


def test_a_claim_holds_if_all_of_its_contrasts_do() -> None:
    from paper_claims_statistics import combined

    assert combined(["holds", "holds"]) == "holds"
    assert combined(["holds", "undecided"]) == "undecided"
    assert combined(["undecided", "does not hold here"]) == "does not hold here"


def test_power_by_the_tables() -> None:
    from paper_claims_statistics import detectable, power

    # Cohen, and every program for it: a paired t-test with n = 10 and d = 1 has a power of 0.80, with d = 0.5 of 0.29
    assert power(10, 0.02, 0.02) == pytest.approx(0.803, abs=1e-3)
    assert power(10, 0.5, 1.0) == pytest.approx(0.293, abs=1e-3)
    assert power(10, 0.0, 1.0) == pytest.approx(0.025)
    assert detectable(10, 0.02) == pytest.approx(0.02, abs=2e-4)


def test_the_best_rate_and_of_equals_the_smallest() -> None:
    from paper_claims_statistics import choose_rate

    assert choose_rate({1e-4: [0.5, 0.7], 3e-4: [0.9, 0.5], 1e-3: [0.1, 0.2]}) == 3e-4
    assert choose_rate({1e-3: [0.6], 1e-4: [0.6]}) == 1e-4
    with pytest.raises(ValueError, match="different numbers of seeds"):
        choose_rate({1e-4: [0.5], 3e-4: [0.9, 0.5]})


def test_steps_that_sample_the_budget() -> None:
    from paper_claims_statistics import steps_for

    assert steps_for([10, 20, 30], 30) == 2
    assert steps_for([10, 20, 30], 44) == 2  # 30 is 14 away, 60 is 16 away
    assert steps_for([10, 20, 30], 46) == 3
    assert steps_for([10, 20, 30], 120) == 5  # the last step's tokens go on: 60, 90, 120
    assert steps_for([10], 1) == 1


def test_the_area_of_a_curve_up_to_a_number_of_tokens() -> None:
    from paper_claims_statistics import area

    # 10 tokens at 0.2, 10 of the next 30 at 0.8: (2 + 8) / 20
    assert area([10, 30], [0.2, 0.8], 20) == pytest.approx(0.5)
    assert area([10, 30], [0.2, 0.8], 40) == pytest.approx((2 + 24) / 40)


def test_the_area_under_checkpoints() -> None:
    from paper_claims_statistics import area_of_points

    # from 0.2 to 0.6 over 10 tokens, then to 1.0 over 20: means 0.4 and 0.8
    points = [(0.0, 0.2), (10.0, 0.6), (30.0, 1.0)]
    assert area_of_points(points, 30) == pytest.approx((10 * 0.4 + 20 * 0.8) / 30)
    assert area_of_points(points, 20) == pytest.approx((10 * 0.4 + 10 * 0.7) / 20)


def test_tokens_to_an_accuracy_and_growth() -> None:
    from paper_claims_statistics import cut, growth, smooth, tokens_to

    assert tokens_to([10, 10, 20], [0.1, 0.5, 0.6], 0.5) == 20
    assert tokens_to([10, 10, 20], [0.1, 0.5, 0.6], 0.9) == 40
    assert smooth([1.0, 3.0, 8.0], over=2) == [1.0, 2.0, 5.5]
    assert cut([10, 10, 20], 39) == 2 and cut([10, 10, 20], 40) == 3 and cut([10], 1) == 1
    assert growth([20.0, 22.0, *[30.0] * 16, 35.0, 37.0]) == 36.0 - 21.0
    assert growth([20.0, 50.0, 26.0]) == 6.0
    assert growth([20.0, 22.0, *[30.0] * 16, 35.0, 37.0], 2) == 36.0 - 30.0
    assert growth([20.0, 50.0, 26.0], 9) == 0.0  # from the last step to itself


def test_the_step_from_which_on_the_format_is_saturated() -> None:
    from paper_claims_statistics import saturated

    # Means of five steps: 0, 0.2, 0.4, 0.6, 0.8, 1, 1; that of the end is 1.
    assert saturated([0.0] * 5 + [1.0] * 6) == 5
    assert saturated([0.9] * 8) == 0 and saturated([0.0] * 8) == 0 and saturated([0.5]) == 0


def test_a_rate_that_cannot_win() -> None:
    from paper_claims_statistics import cannot_win

    # With 1 on the third seed, 0.3 + 0.4 + 1 is still below 0.9 + 0.9 + 0; 0.5 + 0.4 + 1 is not.
    assert cannot_win({1e-4: [0.5, 0.4], 3e-4: [0.9, 0.9], 1e-3: [0.3, 0.4]}, 3) == {1e-3}
    assert cannot_win({1e-4: [], 3e-4: [0.9]}, 3) == set() and cannot_win({1e-4: [], 3e-4: []}, 3) == set()


def test_the_outcomes_of_two_arms_on_one_seed() -> None:
    from paper_claims_outcomes import outcomes

    fast = {"curve": {"tokens": [10] * 4, "accuracy": [0.5] * 4}, "peak_mb": 3.0, "table": {"pass@1": 0.5}}
    slow = {"curve": {"tokens": [20] * 4, "accuracy": [0.0, 0.0, 1.0, 1.0]}, "peak_mb": None, "table": {"pass@1": 0.7}}
    assert outcomes("auc", [fast, slow]) == [0.5, 0.0]  # up to 40 tokens, which are two steps of the slow one
    assert outcomes("pass@1", [fast, slow]) == [0.5, 0.7]
    assert outcomes("peak_mb", [fast, slow]) == [3.0, None]
    # The weaker one ends with 0 within 40 tokens: both are there after their first step.
    assert outcomes("tokens_to_accuracy", [fast, slow]) == [0.25, 0.5]


def test_the_seeds_follow_the_rule_and_are_not_those_of_the_choice() -> None:
    from paper_claims_design import Design

    seeds = Design.read().seeds
    assert seeds.seeds() == [2018, 2019, 2021, 2026, 2037, 2039, 2043, 2044, 2060, 2067]
    assert not set(seeds.seeds()) & set(seeds.tuned_on)


def test_every_arm_is_a_recipe_with_the_reward_that_it_states() -> None:
    from paper_claims_design import Choice, Design, Run, overrides_of

    from flows.recipe.load import load_recipe

    design = Design.read()
    arms = design.arms_for(design.claims)
    assert arms == list(dict.fromkeys(arms)) and set(arms) == set(design.arms)
    choices = {name: Choice(1e-4 if arm.rate else None, arm.steps or 7) for name, arm in design.arms.items()}
    rewarded = {}
    for name in arms:
        run = Run(name, 2018, choices[name].rate, choices[name].steps)
        recipe = load_recipe(design.recipe, overrides_of(design, run, choices), run.seed)
        section = recipe.r1_zero if design.arms[name].graph == "zero" else recipe.reasoning_rl
        assert section is not None
        rewarded[name] = set(section.rewards)
        assert section.steps == (2 if name.startswith("memory") else 70 if name == "dev1" else 7)
        assert name == "dev1" or section.optimizer.learning_rate == (3e-4 if name.startswith("memory") else 1e-4)
    others = {"zero": {"accuracy", "format"}, "cold_start": {"accuracy", "format"}}
    others["grpo_language"] = {"accuracy", "language"}
    assert rewarded == {name: others.get(name, {"accuracy"}) for name in arms}


def test_the_graphs_are_made_of_the_recipes_stages() -> None:
    from paper_claims_graphs import GRAPHS

    from flows.recipe.load import load_recipe

    recipe = load_recipe("tiny")
    by_model = ['reasoning_rl.supervision="process"', 'reasoning_rl.step_reward="process_reward_model"']
    to_dev1 = ["problems", "base", "cold_start_data", "cold_start_sft"]

    def names(graph: Any, of: Any = recipe) -> list[str]:
        return [step.name for step in GRAPHS[graph](of)]

    assert names("dev1") == [*to_dev1, "evaluate"]
    assert names("rl") == [*to_dev1, "reasoning_rl", "evaluate"]
    with_model = names("rl", load_recipe("tiny", by_model))
    assert with_model == [*to_dev1, "process_reward_model", "reasoning_rl", "evaluate"]
    assert names("zero") == ["problems", "base", "r1_zero", "evaluate"]
    student = ["sft_data", "base_small", "student_small", "evaluate"]
    assert names("distill") == [*to_dev1, "reasoning_rl", *student]
    small = {step.name: step.inputs for step in GRAPHS["small"](recipe)}
    assert list(small) == ["problems", "base_small", *to_dev1[2:], "reasoning_rl", "evaluate"]
    assert small["cold_start_sft"]["base"] == small["cold_start_data"]["base"] == "base_small"


def test_a_design_with_a_mistake_is_refused() -> None:
    from paper_claims_design import Design

    values = Design.read().model_dump(by_alias=True)
    with pytest.raises(ValueError, match="rates are chosen on seeds that the claims are tested on"):
        Design.model_validate({**values, "seeds": {**values["seeds"], "tuned_on": [2018]}})
    with pytest.raises(ValueError, match="arm x: no arm 'nothing'"):
        Design.model_validate({**values, "arms": {**values["arms"], "x": {"graph": "rl", "like": "nothing"}}})
    with pytest.raises(ValueError, match="no question 'memories'; choose from grpo_over_online_rft"):
        Design.read().claims_named(["memories"])


def record(design: Any, run: Any, choices: Any, accuracy: float) -> dict[str, Any]:
    from paper_claims_design import overrides_of

    steps = run.steps or 0
    return {
        "commit": "0ab",
        "overrides": overrides_of(design, run, choices),
        "table": {"pass@1": accuracy, "cons@k": accuracy, "pass@k": accuracy, "language": 1.0},
        "keys": {},
        "seconds": {"base": 100.0, "rl": 2.0 * steps},
        "curve": {"tokens": [6000] * steps, "accuracy": [accuracy] * steps, "length": [30.0] * steps},
        "peak_mb": 1.0,
    }


def test_a_study_from_its_pilots_to_its_verdict(tmp_path: Path) -> None:
    from paper_claims import missing_runs
    from paper_claims_design import Choice, Design
    from paper_claims_outcomes import Study
    from paper_claims_page import page
    from paper_claims_plan import Journal, current, decide

    design = Design.read()
    claims = design.claims_named(["grpo_over_online_rft"])
    arms, seeds = design.arms_for(claims), design.seeds.seeds()
    journal = Journal(tmp_path / "journal.jsonl", "this version")
    pilots = missing_runs(design, arms, seeds, journal)
    assert len(pilots) == 2 * 3 * 3 and {run.seed for run in pilots} == {0, 1, 2}
    for run in pilots:
        journal.add(run, record(design, run, {}, 0.9 if run.rate == 3e-4 else 0.8))
    choices, _ = decide(design, arms, journal.records())
    assert choices == {"grpo": Choice(3e-4, 40), "online_rft": Choice(3e-4, 40)}  # 40 * 6,000 = 240,000
    runs = missing_runs(design, arms, seeds, journal)
    # of online RFT also the checkpoint after 20 steps
    assert len(runs) == 10 * 3 and [run.steps for run in runs[:3]] == [40, 20, 40]
    for run in runs[:-1]:
        journal.add(run, record(design, run, choices, 0.8 if run.arm == "grpo" else 0.7))
    with journal.path.open("a") as file:
        file.write('{"version": "this version", "run": {"ar')  # a kill
    assert missing_runs(design, arms, seeds, journal) == runs[-1:]

    def results() -> Any:
        study = Study(design, choices, current(design, journal.records(), choices))
        return [study.result(claim) for claim in claims]

    assert results()[0].verdict is None  # nine of ten seeds
    assert "9 of 10" in page(design, results(), choices, journal.records(), [], "", tmp_path)
    journal.add(runs[-1], record(design, runs[-1], choices, 0.7))
    assert results()[0].verdict == "holds" and missing_runs(design, arms, seeds, journal) == []
    text = page(design, results(), choices, current(design, journal.records(), choices), [], "", tmp_path)
    decided = "| GRPO > online RFT | DSM 5.2.1 | holds | +10.0 (10.0 to 10.0) | 10 of 10 "
    assert decided + "| `--questions grpo_over_online_rft` |" in text
    assert "| grpo | 0.0003 | 40 | 240,000 | 80.0 | 100.0 | 10 |" in text
    assert "| grpo | 0.0001: 80.0; 0.0003: 90.0; 0.001: 80.0 | 0.0003 |" in text
    assert "| grpo_over_online_rft | auc | above 0 (margin 2.0) | 2.0 | 80% | 2.0 |" in text
    # Another version of the recipe asks for its runs again.
    assert Journal(journal.path, "another version").records() == {}


def test_the_page_keeps_what_stands_around_its_generated_part(tmp_path: Path) -> None:
    from paper_claims_page import BEGIN, END, write

    file = tmp_path / "claims.md"
    write(file, "first")
    assert file.read_text() == f"# The papers' claims\n\n{BEGIN}\n\nfirst\n{END}\n"
    file.write_text(f"# Title\n\nWords.\n\n{file.read_text().partition('claims')[2].lstrip()}More words.\n")
    write(file, "second")
    assert file.read_text() == f"# Title\n\nWords.\n\n{BEGIN}\n\nsecond\n{END}\nMore words.\n"
    file.write_text("words")
    with pytest.raises(ValueError, match="has no generated part"):
        write(file, "third")
