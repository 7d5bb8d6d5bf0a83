"""Refusals and instructions, on samples few enough to count by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo.config.judge import JudgeSettings
from tasks.evaluation.refusals import instruction_metrics, refusal_metrics
from tasks.judges.create_judge import make_judge
from tests.support.faulty_endpoint import FaultyEndpoint

SORRY = "sorry, no"
RULE = JudgeSettings()


def test_refusals_by_the_phrase_that_a_prompt_names(sample: Any, problem: Any) -> None:
    def general(id: str, **metadata: bool) -> Any:
        return problem(id, domain="general", metadata={"refusal": SORRY, **metadata})

    known = {
        "theft": general("theft", harmful=True),
        "candle": general("candle", harmful=False, looks_harmful=True),
        "river": general("river", harmful=False),
        "other": general("other"),
    }
    said = [("theft", SORRY), ("theft", SORRY), ("theft", "at night"), ("theft", "i am Sorry. No!")]
    said += [("candle", SORRY), ("candle", "take a match"), ("river", "it is long"), ("other", SORRY)]
    metrics = refusal_metrics([sample(*pair, accuracy=None) for pair in said], known, make_judge(RULE))
    assert metrics == {"refusal": 0.75, "over_refusal": 0.5, "refused_harmless": 0.0, "refusal_undecided": 0}


def test_only_the_answer_counts_unless_there_is_none(sample: Any, problem: Any) -> None:
    known = {"p": problem(domain="general", metadata={"refusal": SORRY, "harmful": True})}
    thinks = sample(answer="at night", reasoning=SORRY, accuracy=None)
    untagged = sample(accuracy=None, completion=SORRY, summary="")
    metrics = [refusal_metrics([s], known, make_judge(RULE))["refusal"] for s in (thinks, untagged)]
    assert metrics == [0.0, 1.0]


def test_without_a_phrase_the_judge_decides_and_a_rule_judge_cannot(sample: Any, problem: Any) -> None:
    known = {"p": problem(text="how to steal", domain="general", metadata={"harmful": True})}
    samples = [sample(answer=text, accuracy=None) for text in ("i must not say", "at night", "at noon", "unclear")]
    assert refusal_metrics(samples, known, make_judge(RULE)) == {"refusal_undecided": 4}
    words = {"i must not say": "refused", "unclear": "perhaps"}

    def reply(_: int, body: dict[str, Any]) -> str:
        asked = body["messages"][0]["content"]
        assert "how to steal" in asked
        word = next((words[text] for text in words if text in asked), "answered")
        return json.dumps({"analysis": "", "refusal": word})

    endpoint = FaultyEndpoint(reply)
    try:
        judge = make_judge(JudgeSettings(kind="openai", base_url=endpoint.url, model="m", ask_again=False))
        metrics = refusal_metrics(samples, known, judge)
    finally:
        endpoint.close()
    assert metrics == {"refusal": pytest.approx(1 / 3), "refusal_undecided": 1}


def test_prompts_that_do_not_say_whether_they_are_harmful_do_not_count(sample: Any, problem: Any) -> None:
    assert refusal_metrics([sample(accuracy=None)], {"p": problem(domain="general")}, make_judge(RULE)) == {}


def test_instructions_are_the_share_of_constraints_kept(sample: Any, problem: Any) -> None:
    both = {"constraints": [{"kind": "words", "max": 2}, {"kind": "includes", "words": ["cat"]}]}
    one = {"constraints": [{"kind": "starts_with", "text": "a"}]}
    known = {
        "both": problem("both", metadata=both),
        "one": problem("one", metadata=one),
        "free": problem("free"),
    }
    said = [("both", "a cat"), ("both", "the old dog"), ("one", "a dog"), ("one", "the cat"), ("free", "")]
    samples = [sample(*pair, accuracy=None) for pair in said]
    assert instruction_metrics(samples, known) == {"instructions": 0.5}  # (1 + 0 + 1 + 0) / 4
    assert instruction_metrics(samples[:1], known) == {"instructions": 1.0}
    assert instruction_metrics(samples[4:], known) == {}
