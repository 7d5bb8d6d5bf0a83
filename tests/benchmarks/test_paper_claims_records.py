"""The study of the papers' claims: which records count, what becomes of runs that fail, and how long it takes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from flows.run.executor import RecipeFailed
from tasks.trainer.outcome import StageFailed

pytestmark = pytest.mark.usefixtures("benchmark_scripts")

DIVERGED = "the trainer exited with 1: error: training stopped: not_finite: step 3: loss is nan (no way); log: /x/log"


@pytest.fixture
def design() -> Any:
    from paper_claims_design import Design

    return Design.read()


def made(design: Any, run: Any, choices: Any, right: float = 0.5, **more: Any) -> dict[str, Any]:
    """A record of a run."""
    from paper_claims_design import overrides_of, start_of

    steps = run.steps or 0
    curve = {name: [right] * steps for name in ("accuracy", "format", "length")} | {"tokens": [6000] * steps}
    return {
        "commit": "0ab",
        "graph": design.arms[run.arm].graph,
        "start": start_of(design, run, choices),
        "overrides": overrides_of(design, run, choices),
        "table": dict.fromkeys(("pass@1", "cons@k", "pass@k", "language"), right),
        "keys": {},
        "seconds": {"rl": 2.0 * steps, "evaluate": 10.0},
        "curve": curve,
        "peak_mb": 1.0,
    } | more


def test_a_run_without_the_measure_of_its_question_is_not_finished(design: Any, tmp_path: Path) -> None:
    from paper_claims import missing_runs
    from paper_claims_plan import Journal, decide

    arms, journal = design.arms_for(design.claims_named(["memory"])), Journal(tmp_path / "journal", "1")
    seeds = [2018]
    choices, _ = decide(design, arms, {})
    grpo, ppo = missing_runs(design, arms, seeds, journal)[::-1]
    journal.add(grpo, made(design, grpo, choices))
    journal.add(ppo, made(design, ppo, choices, peak_mb=None))  # killed and continued
    assert missing_runs(design, arms, seeds, journal) == [ppo]
    journal.add(ppo, made(design, ppo, choices))
    assert missing_runs(design, arms, seeds, journal) == []


@pytest.fixture
def executed(design: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Executes runs, of which each call takes the next of `outcomes`: a peak, None, or an error. Returns what was
    forced, call by call."""
    import paper_claims_runs as runs
    from paper_claims_plan import Journal

    class Nothing:
        def open(self) -> None: ...
        def find(self, key: str, compare: bool) -> None: ...

    monkeypatch.setattr(runs, "tracking", Nothing)
    monkeypatch.setattr(runs, "store", Nothing)
    monkeypatch.setattr(runs, "prefect_server", lambda logs: nullcontext())

    def execute(todo: list[Any], choices: Any, outcomes: list[Any]) -> list[Any]:
        forced: list[Any] = []

        def one(*arguments: Any) -> dict[str, Any]:
            forced.append(arguments[7])
            if isinstance(outcomes[0], Exception):
                raise outcomes.pop(0)
            return {"stages": [], "peak": outcomes.pop(0)}

        def measures(design: Any, run: Any, overrides: Any, result: Any) -> dict[str, Any]:
            return made(design, run, choices, peak_mb=result["peak"])

        monkeypatch.setattr(runs, "paper_claims", one)
        monkeypatch.setattr(runs, "record_of", measures)
        runs.execute(design, todo, choices, Journal(tmp_path / "journal", "1"), False, os.getppid())
        return forced

    return execute


def test_a_run_whose_memory_is_unknown_is_made_again(
    design: Any, executed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paper_claims_plan import Journal, decide, main_runs

    from grpo.errors import InputError

    arms = design.arms_for(design.claims_named(["memory"]))
    choices, _ = decide(design, arms, {})
    (ppo,) = [run for run in main_runs(design, arms, choices, [2018]) if run.arm == "memory_ppo"]
    with pytest.raises(InputError, match="memory_ppo, 2 steps, seed 2018: three tries gave no peak memory"):
        executed([ppo], choices, [None, None, None])
    assert Journal(tmp_path / "journal", "1").records() == {}
    assert executed([ppo], choices, [None, None, 7.0]) == [[], ["reasoning_rl"], ["reasoning_rl"]]
    assert Journal(tmp_path / "journal", "1").records()[ppo]["peak_mb"] == 7.0
    assert "its record lacks the peak memory; RL is made again" in capsys.readouterr().err
    assert executed([ppo], choices, []) == []


def test_a_curve_that_is_not_whole_is_none() -> None:
    import pandas as pd
    from paper_claims_runs import curve_of

    frame = pd.DataFrame({"completion_tokens": [2.5, 3.0], "reward_accuracy": [0.0, 0.5], "reward": [0.0, 0.5]})
    assert curve_of(frame, 2, 4) == {"tokens": [10, 12], "length": [2.5, 3.0], "accuracy": [0.0, 0.5]}
    assert curve_of(frame.assign(reward_format=1.0), 2, 4)["format"] == [1.0, 1.0]  # type: ignore[index]
    assert curve_of(frame, 3, 4) is None and curve_of(pd.DataFrame(), 2, 4) is None


def test_a_pilot_run_that_diverges_counts_nothing_and_the_study_goes_on(
    design: Any, executed: Any, tmp_path: Path
) -> None:
    from paper_claims import missing_runs
    from paper_claims_page import rates_table
    from paper_claims_plan import Journal, decide, pilot_runs

    journal, arms = Journal(tmp_path / "journal", "1"), ["grpo"]
    *others, last = pilot_runs(design, "grpo")[:3]
    executed([last], {}, [RecipeFailed({}, "reasoning_rl", StageFailed(DIVERGED))])
    assert journal.records()[last]["diverged"] == "not_finite: step 3: loss is nan (no way)"
    for run in others:
        journal.add(run, made(design, run, {}))
    # 0.5 on this seed and more than nothing on each of two others: the rate that diverged can still win with 0, 1, 1.
    assert missing_runs(design, arms, [2018], journal) == pilot_runs(design, "grpo")[3:]
    for run in pilot_runs(design, "grpo")[3:6]:
        journal.add(run, made(design, run, {}, 0.9 if run.rate == 3e-4 else 0.3))
    left = missing_runs(design, arms, [2018], journal)  # 1e-3 has 0 + 0.3 and 1 at most, below 0.5 + 0.9
    assert [run.rate for run in left] == [1e-4, 3e-4]
    for run in left:
        journal.add(run, made(design, run, {}))
    assert decide(design, arms, journal.records())[0]["grpo"].rate == 3e-4
    (row,) = rates_table(design, arms, decide(design, arms, journal.records())[0], journal.records())[2:]
    assert "0.001: 15.0 on 2 of 3 seeds, 1 diverged" in row


def test_another_failure_ends_the_seed(design: Any, executed: Any) -> None:
    from paper_claims_plan import pilot_runs

    with pytest.raises(RecipeFailed, match="killed"):
        executed(pilot_runs(design, "grpo")[:1], {}, [RecipeFailed({}, "base", StageFailed("it was killed"))])


def test_a_main_run_that_diverges(design: Any) -> None:
    from paper_claims_design import Choice, Run
    from paper_claims_outcomes import Study
    from paper_claims_page import gone_wrong

    choices = {name: Choice(1e-4, 4) for name in ("grpo", "grpo_language")} | {"dev1": Choice()}
    records = {}
    for seed in design.seeds.seeds():
        for name, choice in choices.items():
            run = Run(name, seed, choice.rate, choice.steps)
            records[run] = made(design, run, choices)
    lost = Run("grpo", 2018, 1e-4, 4)
    records[lost] = {"overrides": records[lost]["overrides"], "diverged": "not_finite: step 3"}
    study = Study(design, choices, records)
    (claim,) = design.claims_named(["language_reward"])
    cost, bound, language, _ = [study.compare(contrast) for contrast in claim.contrasts]
    assert cost.differences == (-0.5, *[0.0] * 9) and cost.verdict is not None
    assert (bound.verdict, bound.diverged, len(bound.seeds)) == ("undecided", (2018,), 9)
    assert (language.verdict, language.diverged) == ("undecided", (2018,))
    assert "- grpo at 0.0001, 4 steps, seed 2018: not_finite: step 3" in gone_wrong(records, [])


def test_a_checkpoint_that_diverges(design: Any) -> None:
    """Online RFT's run of 2 steps diverges on the first seed, the one of 4 does not: there is no curve over both."""
    from paper_claims_design import Choice, Run
    from paper_claims_outcomes import Study
    from paper_claims_plan import main_runs

    arms, seeds = ["dev1", "online_rft", "rft"], design.seeds.seeds()
    choices = {"dev1": Choice(), "online_rft": Choice(1e-4, 4), "rft": Choice(1e-4, 4)}
    records = {run: made(design, run, choices) for run in main_runs(design, arms, choices, seeds)}
    shorter = Run("online_rft", 2018, 1e-4, 2)
    records[shorter] = {"overrides": records[shorter]["overrides"], "diverged": "not_finite: step 2"}
    (claim,) = design.claims_named(["online_rft_over_rft"])
    of_whole, of_both = map(Study(design, choices, records).compare, claim.contrasts)
    assert (of_whole.diverged, len(of_whole.seeds), of_whole.verdict) == ((), 10, "does not hold here")  # all 0.5
    assert (of_both.diverged, len(of_both.seeds), of_both.verdict) == ((2018,), 9, "undecided")
    del records[Run("rft", 2018, 1e-4, 4)]
    unfinished = Study(design, choices, records).compare(claim.contrasts[1])
    assert (unfinished.diverged, unfinished.verdict) == ((), None)


def test_runs_from_another_start_are_made_again(design: Any, tmp_path: Path) -> None:
    from paper_claims import missing_runs
    from paper_claims_design import Choice
    from paper_claims_page import gone_wrong
    from paper_claims_plan import Journal, decide, superseded

    arms, journal = design.arms_for(design.claims_named(["memory"])), Journal(tmp_path / "journal", "1")
    choices, _ = decide(design, arms, {})
    assert choices["memory_grpo"] == Choice(None, 2)
    runs = missing_runs(design, arms, [2018, 2019], journal)
    for run in runs:
        journal.add(run, made(design, run, choices, artifacts={f"base {run.seed}": "one CPU"}))
    assert missing_runs(design, arms, [2018, 2019], journal) == []
    first, second = runs[:2]
    journal.add(second, made(design, second, choices, artifacts={"base 2018": "another CPU"}))
    assert superseded(design, journal.records()) == missing_runs(design, arms, [2018, 2019], journal) == [first]
    assert f"- {first.name}" in gone_wrong(journal.records(), [first])
    journal.add(first, made(design, first, choices, artifacts={"base 2018": "another CPU"}))
    assert missing_runs(design, arms, [2018, 2019], journal) == []


@pytest.mark.parametrize(
    "change",
    [
        {"process_fixed": {"keeps": []}},
        {"process_fixed": {"graph": "small"}},
        {"process_fixed": {"after": "process_learnt"}},
        {"process_half": {"overrides": ["reasoning_rl.kl_coef=0.01"]}},
    ],
    ids=["keeps", "graph", "after", "the first round"],
)
def test_what_defines_a_second_round_is_compared(design: Any, change: dict[str, Any]) -> None:
    from paper_claims_design import Choice, Design, Run
    from paper_claims_plan import current

    choices = {name: Choice(None, 4) for name in ("process_learnt", "process_half", "process_fixed")}
    run = Run("process_fixed", 2018, None, 4)
    records = {run: json.loads(json.dumps(made(design, run, choices)))}
    assert current(design, records, choices) == records
    values = design.model_dump(by_alias=True)
    for name, fields in change.items():
        values["arms"][name] |= fields
    assert current(Design.model_validate(values), records, choices) == {}


def test_rl_on_the_small_model_takes_as_many_completions_as_its_teacher(design: Any) -> None:
    from paper_claims_plan import decide, pilot_runs

    from flows.recipe.load import load_recipe

    recipe = load_recipe(design.recipe, [*design.overrides, *design.arms["distilled"].overrides])
    assert recipe.reasoning_rl is not None and recipe.sft_data is not None
    step = recipe.reasoning_rl.prompts_per_step * recipe.reasoning_rl.group_size
    for_student = recipe.sft_data.problems * recipe.sft_data.samples_per_problem
    assert design.arms["small_rl"].more_steps * step == for_student
    records = {run: made(design, run, {}) for name in ("grpo", "small_rl") for run in pilot_runs(design, name)}
    choices, _ = decide(design, ["grpo", "small_rl"], records)
    assert choices["small_rl"].steps == choices["grpo"].steps + 25 == 40 + 25


def test_the_estimate_counts_what_is_shared_once(design: Any) -> None:
    from paper_claims_design import Run, Seconds
    from paper_claims_estimate import estimate_seconds
    from paper_claims_plan import decide, pilot_runs

    stages = {"problems": 1, "base": 100, "base_small": 50, "cold_start_data": 1, "cold_start_sft": 1}
    seconds = Seconds(stages=stages | {"sft_data": 7, "student_small": 3, "evaluate": 10}, step=2.0, run=0.0)
    small = design.model_copy(update={"seconds": seconds})
    arms = ["grpo", "distilled", "small_rl"]

    def left(records: Any, has: bool = True, arms: list[str] = arms, seeds: Any = (2018,)) -> float:
        return estimate_seconds(small, arms, seeds, records, lambda key: has)[1]

    # Three seeds with three rates of 28 steps, and a main run of as many: 103 up to Dev1 on each of four seeds.
    assert left({}, arms=["grpo"]) == 4 * 103 + 10 * (28 * 2 + 10)
    # A main run of all: the small base once, the teacher's RL once.
    grpo, distilled = 103 + 56 + 10, 50 + 7 + 3 + 10
    assert left({}) - left({}, seeds=()) == grpo + distilled + 2 + 53 * 2 + 10
    # After grpo's pilot runs of 28 steps the students' pilot runs need a teacher of 40 steps on each of their seeds.
    records = {run: made(design, run, {}, seconds={"rl": 56.0, "evaluate": 10.0}) for run in pilot_runs(design, "grpo")}
    keys = {name: name for name in ("problems", "base", "cold_start_data", "cold_start_sft", "reasoning_rl")}
    records = {run: record | {"keys": keys} for run, record in records.items()}
    pilots = {"arms": ["grpo", "distilled"], "seeds": ()}
    assert left(records, **pilots) == 3 * (80 + 7 + 50) + 9 * 13
    assert left(records, has=False, **pilots) == 3 * (103 + 80 + 7 + 50) + 9 * 13  # an empty home
    # With one of them made, two rates of its seed are left, which share the teacher and the rest.
    choices, _ = decide(design, ["grpo"], records)
    of_student = pilot_runs(design, "distilled")[0]
    more = {"keys": keys | {"sft_data": "sft_data", "base_small": "base_small"}, "seconds": {}}
    records[of_student] = made(design, of_student, choices, **more)
    assert left(records, **pilots) == 2 * (80 + 7 + 50) + 8 * 13
    # Arms of another size have guesses of their own.
    assert left({}, arms=["memory_grpo", "memory_ppo"]) == 2 * 60
    choices, _ = decide(design, ["memory_grpo"], {})
    run = Run("memory_grpo", 2018, None, 2)
    own = {run: made(design, run, choices, seconds={"base": 5.0, "rl": 4.0, "evaluate": 1.0})}
    assert left(own, arms=["memory_grpo"], seeds=(2018, 2019)) == 5 + 3 + 4 + 1
