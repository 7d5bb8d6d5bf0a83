"""Rewards from a judge's verdicts: a real endpoint on a socket that knows the answer or fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from grpo.config.rl import RL, Scoring
from grpo.data.records import Problem
from grpo.data.template import parse
from grpo.errors import InputError, TrainingStopped
from grpo.judging.background_verdicts import AnswerJudge
from grpo.rewards.functions import Response
from grpo.rewards.judged import reads_reference
from grpo.scoring.agreement import agreement
from grpo.scoring.scorer import Scored, Scorer
from tests.support.faulty_endpoint import FaultyEndpoint

ASKED = [{"role": "user", "content": "Where do swans nest?"}]


def problem(verifier: str, answer: str = "By the river.", domain: str = "reasoning", **metadata: Any) -> Problem:
    return Problem("swans", ASKED, answer, verifier, domain, "en", "test", metadata)  # type: ignore[arg-type]


def responses(*answers: str) -> list[Response]:
    texts = [f"<think>hm</think><answer>{answer}</answer>" if answer else "no idea" for answer in answers]
    return [Response(text, parse(text), 9, True, 20) for text in texts]


def knows(number: int, body: dict[str, Any]) -> str:
    """Right is what mentions the bank; a criterion is fulfilled that the response repeats."""
    asked = body["messages"][0]["content"]
    if "<criterion>" in asked:
        criterion, response = (asked.split(f"<{n}>\n")[1].split(f"\n</{n}>")[0] for n in ("criterion", "response"))
        verdict = "fulfilled" if criterion in response else "not fulfilled"
        return json.dumps({"analysis": "", "verdict": verdict})
    answer = asked.split("<answer_to_check>\n")[1].split("\n</answer_to_check>")[0]
    if "mumble" in answer:
        return "I cannot say."
    return json.dumps({"analysis": "", "correctness": "correct" if "bank" in answer else "incorrect"})


@pytest.fixture
def score(tmp_path: Path) -> Iterator[Callable[..., tuple[Scored, FaultyEndpoint]]]:
    open_: list[Any] = []

    def run(
        asked: Problem, answers: list[str], *rewards: str, plan: Any = knows, time_limit_s: float = 10, **judge: Any
    ) -> Any:
        endpoint = FaultyEndpoint(plan)
        open_.append(endpoint)
        fast = {"backoff_s": 0.01, "retries": 1, "timeout_s": 5, "ask_again": False, "away_max_s": 0.3}
        settings = JudgeSettings(kind="openai", base_url=endpoint.url, model="m", **{**fast, **judge})
        scorer = Scorer(
            {name: {} for name in rewards or ("accuracy", "format")},
            Scoring(workers=1, time_limit_s=time_limit_s),
            judge=AnswerJudge(settings, tmp_path / "judge"),
        )
        open_.append(scorer)
        return scorer.start(asked, responses(*answers)).finish(), endpoint

    yield run
    for item in reversed(open_):
        item.close()


def column(scored: Scored, name: str) -> list[float | None]:
    return [breakdown.get(name) for breakdown in scored.breakdowns]


def test_the_judge_verifies_what_has_no_rule_and_equal_answers_are_asked_once(score: Any) -> None:
    scored, endpoint = score(problem("judge"), ["On the bank.", "In trees.", "On the bank.", ""])
    assert column(scored, "accuracy") == [1.0, 0.0, 1.0, 0.0]
    assert column(scored, "judge") == [1.0, 0.0, 1.0, None]
    assert column(scored, "format") == [1.0, 1.0, 1.0, 0.0]
    assert len(endpoint.bodies) == 2 and scored.failures.kinds == {}


def test_the_judge_is_shown_all_messages_of_the_prompt(score: Any) -> None:
    system = {"role": "system", "content": "Answer in one word."}
    for asked, rewards in ((problem("judge"), ("accuracy",)), (problem("none", rubric=["bank"]), ("rubric",))):
        _, endpoint = score(dataclasses.replace(asked, messages=[system, *ASKED]), ["bank"], *rewards)
        (text,) = {body["messages"][0]["content"] for body in endpoint.bodies}
        question = text.split("<question>\n")[1].split("\n</question>")[0]
        assert question == "[system]\nAnswer in one word.\n\n[user]\nWhere do swans nest?"


def test_an_undecided_verdict_is_a_counted_failure(score: Any) -> None:
    scored, _ = score(problem("judge"), ["On the bank.", "mumble"])
    assert column(scored, "accuracy") == [1.0, 0.0]
    assert scored.failures.kinds == {"judge_undecided": 1} and scored.failures.broken == 1
    with pytest.raises(TrainingStopped, match="1 of 2 completions .1 judge_undecided"):
        scored.failures.stop_above(0.4)


RUBRIC = [{"criterion": "bank", "weight": 3}, "reeds", {"criterion": "trees", "weight": -2}]


@pytest.mark.parametrize(
    ("verifier", "domain", "name"), [("rubric", "reasoning", "accuracy"), ("none", "general", "rubric")]
)
def test_a_rubric_scores_the_weighted_share(score: Any, verifier: str, domain: str, name: str) -> None:
    asked = problem(verifier, "", domain, rubric=RUBRIC)
    answers = ["bank and reeds", "bank", "reeds", "bank in trees", "trees", "nothing"]
    scored, endpoint = score(asked, answers, "accuracy", "rubric")
    # 4 of weight 4; 3; 1; 3 - 2; -2, which is none; 0.
    assert column(scored, name) == [1.0, 0.75, 0.25, 0.25, 0.0, 0.0]
    assert len(endpoint.bodies) == 18  # one by one


def test_an_undecided_criterion_counts_against_the_response(score: Any) -> None:
    def silent(number: int, body: dict[str, Any]) -> str:
        asked = body["messages"][0]["content"]
        return "Hm." if "<criterion>\nbank" in asked or "<criterion>\ntrees" in asked else knows(number, body)

    scored, _ = score(problem("rubric", "", rubric=RUBRIC), ["bank and reeds"], "accuracy", plan=silent)
    assert column(scored, "accuracy") == [0.0]  # 1 - 2 of 4
    assert scored.failures.kinds == {"judge_undecided": 1}


def test_the_judge_helps_an_unsure_rule_and_never_overrules_it(score: Any) -> None:
    unsure = problem("math")
    assert not reads_reference(unsure)
    answers = ["On the bank.", "In trees.", "by the river"]
    assert column(score(unsure, answers)[0], "accuracy") == [0.0, 0.0, 1.0]
    scored, endpoint = score(unsure, answers, decides_unsure=True)
    assert column(scored, "accuracy") == [1.0, 0.0, 1.0]
    assert len(endpoint.bodies) == 2  # what the rule accepts is not asked
    sure, _ = score(problem("math", "42"), ["41 on the bank", "42"], decides_unsure=True, audit_share=1.0)
    assert column(sure, "accuracy") == [0.0, 1.0] and column(sure, "judge") == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reference", "readable"),
    [
        ("42", True),
        (r"\frac{1}{2}", True),
        (r"x \in (0, 1)", True),
        (r"\sin(x) + arctan(y)", True),
        ("12 cm", True),
        ("by the river", False),
        (r"\text{east}", False),
        ("42 apples", False),
    ],
)
def test_which_references_a_rule_reads(reference: str, readable: bool) -> None:
    assert reads_reference(problem("math", reference)) is readable
    assert reads_reference(problem("exact", reference))


def test_agreement_with_the_rules_by_hand(score: Any) -> None:
    scored, _ = score(problem("number", "42"), ["42 bank", "42", "41 bank", "41", "40"], "accuracy", "judge")
    rows = [
        (problem("number", "42"), {**breakdown, "accuracy": rule})
        for breakdown, rule in zip(scored.breakdowns, (1.0, 1.0, 0.0, 0.0, 0.0), strict=True)
    ]
    assert agreement(rows) == {
        "judge_checked": 5,
        "judge_agreement": 3 / 5,
        "judge_false_correct": 1 / 3,
        "judge_false_incorrect": 1 / 2,
    }
    assert agreement([(problem("judge"), {"accuracy": 1.0, "judge": 1.0})]) == {}
    rubric = [(problem("number", "42"), {"accuracy": 1.0, "rubric": score}) for score in (0.5, 0.4)]
    assert agreement(rubric) == {"rubric_checked": 2, "rubric_agreement": 0.5, "rubric_false_incorrect": 0.5}


def test_agreement_counts_only_what_both_decided(score: Any) -> None:
    def unsure_of_decimals(number: int, body: dict[str, Any]) -> str:
        decimal = "<answer_to_check>\n42.0\n" in body["messages"][0]["content"]
        return "I cannot say." if decimal else json.dumps({"analysis": "", "correctness": "correct"})

    asked = problem("number", "42")
    scored, endpoint = score(asked, ["42", "", "", "42.0"], "accuracy", "judge", plan=unsure_of_decimals)
    assert column(scored, "accuracy") == [1.0, 0.0, 0.0, 1.0]
    assert column(scored, "judge") == [1.0, 0.0, 0.0, 0.0] and len(endpoint.bodies) == 2
    assert agreement((asked, given) for given in scored.given) == {
        "judge_checked": 1,
        "judge_agreement": 1.0,
        "judge_false_incorrect": 0.0,
    }


@pytest.mark.parametrize("rewards", [("accuracy",), ("accuracy", "judge")])
def test_a_rule_that_failed_decided_nothing(score: Any, rewards: Any) -> None:
    endless = problem("math", "9^{9^{9}}")
    scored, _ = score(endless, ["8^{8^{8}} bank"], *rewards, time_limit_s=0.2, audit_share=1.0)
    assert scored.failures.kinds == {"timeout": 1} and column(scored, "accuracy") == [0.0]
    assert column(scored, "judge") == [1.0 if "judge" in rewards else None]
    assert agreement((endless, given) for given in scored.given) == {}


def test_audits_change_no_reward_and_are_the_same_in_a_resumed_run(score: Any) -> None:
    answers = [f"{number} bank" for number in range(40)]
    scored, endpoint = score(problem("exact", "42"), answers, audit_share=0.25)
    asked = [i for i, value in enumerate(column(scored, "judge")) if value is not None]
    assert 3 <= len(asked) <= 20 and len(endpoint.bodies) == len(asked)
    assert column(scored, "accuracy") == [0.0] * 40
    again, _ = score(problem("exact", "42"), answers, audit_share=0.25)
    assert column(again, "judge") == column(scored, "judge")


@pytest.mark.parametrize("fault", ["500", "hang", "closed", "truncated"])
def test_an_endpoint_that_is_away_stops_with_one_line(score: Any, fault: str) -> None:
    with pytest.raises(TrainingStopped, match="has answered nothing for .* run again when it is back"):
        score(problem("judge"), ["On the bank."], plan=lambda number, body: fault, timeout_s=0.2)


def test_an_endpoint_that_is_none_is_the_users_mistake(score: Any) -> None:
    with pytest.raises(InputError, match="is base_url OpenAI-compatible"):
        score(problem("judge"), ["On the bank."], plan=lambda number, body: "html")


def test_what_cannot_be_judged_is_said() -> None:
    scorer = Scorer({"accuracy": {}}, Scoring(workers=1))
    try:
        for verifier in ("judge", "rubric"):
            with pytest.raises(InputError, match=f"verifier '{verifier}', but this job has no judge"):
                scorer.start(problem(verifier, rubric=["bank"]), responses("bank"))
    finally:
        scorer.close()
    with pytest.raises(InputError, match="judge 'rule' verifies no answers; take kind 'local' or 'openai'"):
        AnswerJudge(JudgeSettings(), None)
    base = {"steps": 1, "sampling": {"max_new_tokens": 8}, "optimizer": {"learning_rate": 1e-6}}
    with pytest.raises(ValueError, match="reward 'rubric' is a judge's; set judge to a model"):
        RL.model_validate({**base, "rewards": {"rubric": 1.0}})
    with pytest.raises(ValueError, match="judge.kind 'rule' verifies no answers"):
        RL.model_validate({**base, "judge": {"kind": "rule"}})
    assert "judge" not in RL.model_validate(base).model_dump()


def test_missing_references_and_rubrics_are_said(score: Any) -> None:
    with pytest.raises(InputError, match="verifier 'judge' and no reference answer"):
        score(problem("judge", " "), ["bank"])
    with pytest.raises(InputError, match="verifier 'rubric' and no rubric"):
        score(problem("rubric"), ["bank"])
