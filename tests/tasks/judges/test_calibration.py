"""How well a judge agrees with rules: by a judge at a real endpoint that is right as often as the test says."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.errors import InputError
from tasks.judges.base import Claim
from tasks.judges.calibration import Verified, calibrate, choose, measure, verified, wilson
from tasks.judges.create_judge import make_judge
from tests.support.faulty_endpoint import FaultyEndpoint


def items(right: int, wrong: int) -> list[Verified]:
    good = [Verified(Claim(f"{i} + 0?", str(i), str(i)), True) for i in range(right)]
    return good + [Verified(Claim(f"{i} + 0?", str(i), str(i + 1)), False) for i in range(wrong)]


def test_wilson_interval() -> None:
    # 8 of 10, z = 1.96: (8 + 1.9207) / 13.8415 = 0.7167 +- 1.96 * sqrt(8 * 2 / 10 + 0.9604) / 13.8415 = 0.2266
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_what_is_measured() -> None:
    verdicts: Any = ["correct", "correct", "incorrect", "undecided", "incorrect", "correct", "undecided", "incorrect"]
    numbers = measure(items(4, 4), verdicts)
    # Decided: 3 right ones, 2 of them called correct; 3 wrong ones, 2 of them called incorrect.
    low, high = wilson(4, 6)
    assert numbers == {
        "agreement": 4 / 6,
        "agreement_low": low,
        "agreement_high": high,
        "undecided_share": 2 / 8,
        "false_correct_rate": 1 / 4,
        "false_incorrect_rate": 1 / 4,
        "right": 4,
        "wrong": 4,
    }


def test_a_judge_that_decides_nothing_agrees_with_nothing() -> None:
    numbers = measure(items(1, 0), ["undecided"])
    assert (numbers["agreement"], numbers["agreement_low"], numbers["agreement_high"]) == (0.0, 0.0, 1.0)
    assert numbers["undecided_share"] == 1.0 and "false_correct_rate" not in numbers


@pytest.mark.parametrize(
    ("right", "wrong", "size", "taken"),
    [
        (100, 100, 10, (5, 5)),
        (100, 100, 11, (6, 5)),
        (100, 2, 10, (8, 2)),
        (3, 100, 10, (3, 7)),
        (100, 0, 10, (10, 0)),
        (3, 4, 10, (3, 4)),
        (0, 0, 10, (0, 0)),
    ],
)
def test_half_are_right_as_far_as_there_are_such(right: int, wrong: int, size: int, taken: tuple[int, int]) -> None:
    chosen = choose(items(right, wrong), size, seed=0)
    assert (sum(item.right for item in chosen), sum(not item.right for item in chosen)) == taken
    assert len(set(chosen)) == len(chosen)


def test_the_choice_depends_on_the_items_and_the_seed_alone() -> None:
    pool = items(200, 200)
    chosen = choose(pool, 20, seed=0)
    random.Random(0).shuffle(pool)
    assert choose(pool + pool, 20, seed=0) == chosen
    assert choose(pool, 20, seed=1) != chosen


def test_only_what_a_rule_verified_and_a_judge_can_check(sample: Any, problem: Any) -> None:
    problems = {"p": problem("p"), "code": problem("code", answer=""), "q": problem("q")}
    problems |= {name: problem(name, verifier=name) for name in ("reasoning_gym", "judge")}
    problems["program"] = problem("program", answer="print(3)", verifier="code")
    samples = [
        sample("p"),
        sample("q", answer="4", accuracy=0.0),
        sample("p", accuracy=0.5),
        sample("p", accuracy=None),
        sample("p", answer=" ", accuracy=0.0),
        *(sample(name) for name in ("code", "program", "reasoning_gym", "judge")),
    ]
    assert list(verified(samples, problems)) == [
        Verified(Claim("compute 1 + 2", "3", "3"), True),
        Verified(Claim("compute 1 + 2", "3", "4"), False),
    ]
    talk = dataclasses.replace(problem("p"), messages=[{"role": "system", "content": "Be brief."}, *problem().messages])
    (found,) = verified([sample("p")], {"p": talk})
    assert found.claim.question == "[system]\nBe brief.\n\n[user]\ncompute 1 + 2"


@pytest.fixture
def judge() -> Iterator[Any]:
    """At an endpoint that calls every answer correct, except those to questions that begin with a 7."""

    def plan(_: int, body: dict[str, Any]) -> str:
        question = body["messages"][0]["content"].split("<question>\n")[1]
        return json.dumps({"analysis": "", "correctness": "incorrect" if question.startswith("7") else "correct"})

    endpoint = FaultyEndpoint(plan)
    yield make_judge(JudgeSettings(kind="openai", base_url=endpoint.url, model="m"))
    endpoint.close()


def test_below_the_minimum_it_warns_or_stops(judge: Any, caplog: pytest.LogCaptureFixture) -> None:
    # 0 to 9, right and wrong: agreement on 9 right ones and on one wrong one, of 20.
    with caplog.at_level(logging.WARNING):
        numbers = calibrate(judge, items(10, 10), 0.51, size=50)
    assert numbers["agreement"] == 0.5 and numbers["false_correct_rate"] == 0.9 and numbers["undecided_share"] == 0
    assert "agrees with the rules on 50.0% (95% interval 29.9% to 70.1%) of 20 verified answers" in caplog.text
    with pytest.raises(InputError, match="agreement_min is 51.0%; take a better judge"):
        calibrate(judge, items(10, 10), 0.51, size=50, on_disagreement="stop")


def test_at_the_minimum_all_is_well(judge: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert calibrate(judge, items(10, 10), 0.5, size=50, on_disagreement="stop")["agreement"] == 0.5
    assert not caplog.records


def test_nothing_to_measure(judge: Any) -> None:
    assert calibrate(judge, [], 1.0, size=50, on_disagreement="stop") == {}
    assert calibrate(judge, items(10, 10), 1.0, size=0, on_disagreement="stop") == {}
    assert calibrate(make_judge(JudgeSettings()), items(10, 10), 1.0, size=50, on_disagreement="stop") == {}
    assert judge.counts.to_dict() == {}
