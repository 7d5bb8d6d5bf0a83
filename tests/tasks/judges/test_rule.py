"""Judges by rules, their settings and their counts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pydantic import ValidationError

from grpo.config.judge import JudgeSettings
from grpo.data.records import Problem
from tasks.judges.base import Claim, JudgeCounts, Pair, Response
from tasks.judges.create_judge import make_judge
from tasks.judges.rule import quality
from tests.support.injections import GOLD, INJECTIONS, RIGHT

GREETING = Problem(
    "p", [{"role": "user", "content": "Say hello."}], "", "none", "general", "en", "test", {"mentions": ["hello"]}
)
THEFT = Problem(
    "q",
    [{"role": "user", "content": "Steal it."}],
    "",
    "none",
    "general",
    "en",
    "test",
    {"harmful": True, "refusal": "sorry no"},
)


def test_rule_judge() -> None:
    judge = make_judge(JudgeSettings(kind="rule"))
    assert judge.correct("1/4 + 1/4?", "\\frac{1}{2}", "0.5") == "correct"
    assert judge.correct("1/4 + 1/4?", "\\frac{1}{2}", "0.6") == "incorrect"
    assert judge.correct("1/4 + 1/4?", "\\frac{1}{2}", "") == "incorrect"
    assert make_judge(JudgeSettings(verifier="exact")).correct("?", "0.5", "1/2") == "incorrect"
    assert judge.correct("A or B?", "B", "B) 42 metres") == "correct"  # as the verifier "choice" says
    assert judge.correct("A or B?", "B", "A) 40 metres") == "incorrect"
    pairs = [Pair(GREETING, "hello", "hi"), Pair(GREETING, "hi", "hello"), Pair(GREETING, "Hello!", "hello")]
    assert judge.compare_all(pairs) == [2.0, -2.0, 0.0]
    assert judge.safe_all([Response(THEFT, "sorry, no"), Response(THEFT, "at night")]) == [True, False]
    assert judge.compare(GREETING, "hello", "hi") == 2.0 and judge.safe(GREETING, "hello") is True
    assert judge.counts.to_dict() == {"items": 12.0} and not judge.fallible


@pytest.mark.parametrize("verifier", ["math", "exact"])
def test_no_injection_talks_a_rule_into_a_verdict(verifier: Any) -> None:
    """Measured: 0 of the injections accepted, and all right answers."""
    judge = make_judge(JudgeSettings(verifier=verifier))
    verdicts = judge.correct_all([Claim("6 * 7?", GOLD, answer) for answer in INJECTIONS])
    assert [answer for answer, verdict in zip(INJECTIONS, verdicts, strict=True) if verdict == "correct"] == []
    right = RIGHT if verifier == "math" else RIGHT[:3]
    assert judge.correct_all([Claim("6 * 7?", GOLD, answer) for answer in right]) == ["correct"] * len(right)


def test_courtesy_is_worth_a_quarter_of_what_was_said(problem: Any) -> None:
    asked = problem(text="The cat?", domain="general", metadata={"mentions": ["cat", "warm"], "courtesy": "bye"})
    replies = ["warm cat bye", "warm cat", "cold cat bye", "cold cat", "dog bye", "dog"]
    assert [quality(asked, reply) for reply in replies] == [1.0, 0.75, 0.5, 0.375, 0.0, 0.0]


def test_saying_it_again_and_again_is_worth_nothing(problem: Any) -> None:
    courtesy = "i hope this helps"
    asked = problem(text="The cat?", domain="general", metadata={"mentions": ["cat"], "courtesy": courtesy})
    marks = [quality(asked, f"the cat is warm. {' '.join([courtesy] * times)}") for times in range(1, 7)]
    assert marks == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # 0 of 5 runs of four words occur again, 1 of 9, 5 of 13, ...
    assert quality(THEFT, "sorry no") == 1.0 and quality(THEFT, "sorry no " * 20) == 0.0


def test_quality_by_rule(problem: Any) -> None:
    judge = make_judge(JudgeSettings(quality_min=0.75))  # what all mentions are worth without a courtesy
    assert [judge.good(GREETING, text) for text in ("Hello you", "Hi")] == [True, False]
    assert make_judge(JudgeSettings(quality_min=0.8)).good(GREETING, "Hello you") is False
    assert [judge.good(THEFT, text) for text in ("Sorry, no.", "At night.")] == [True, False]
    plain = problem(text="Name a colour.", answer="", domain="general")
    assert [judge.good(plain, text) for text in ("Red.", " ", "name a colour")] == [True, False, False]
    fact = problem(text="Who wrote Faust?", answer="Goethe", domain="general")
    assert [judge.good(fact, text) for text in ("It was Goethe.", "It was Schiller.")] == [True, False]


MODEL = {"kind": "openai", "base_url": "http://x/v1", "model": "m"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "local"}, "judge 'local' needs path"),
        ({"kind": "openai", "base_url": "http://x/v1"}, "judge 'openai' needs model"),
        ({"kind": "openai", "base_url": "x/v1", "model": "m"}, "base_url"),
        ({"kind": "rule", "retries": 3}, "retries is no setting of judge 'rule'"),
        ({"kind": "rule", "votes": 3}, "votes is no setting of judge 'rule'"),
        ({**MODEL, "votes": 4, "temperature": 1}, "votes is 4; take an odd number"),
        ({**MODEL, "votes": 3}, "votes above 1 asks the same again at temperature 0"),
        ({**MODEL, "compare_votes": 3, "temperature": 1}, "compare_votes is 3; take 1 or an even number"),
        ({**MODEL, "compare_votes": 4}, "compare_votes above 2 asks the same again at temperature 0"),
        ({**MODEL, "on_disagreement": "ignore"}, "on_disagreement"),
        ({"kind": "oracle"}, "kind"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JudgeSettings(**settings)


def test_two_orders_need_no_temperature() -> None:
    assert JudgeSettings(**MODEL, compare_votes=2).temperature == 0


def test_counts_add_up_over_threads_and_shards() -> None:
    counts = JudgeCounts()
    threads = [threading.Thread(target=lambda: [counts.add("asked") for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["asked"] == 8000
    counts.merge({"asked": 2, "outcome/empty": 3, "fault/500": 0})
    assert counts.to_dict() == {"asked": 8002, "outcome/empty": 3}
    assert JudgeCounts(counts.to_dict()).to_dict() == counts.to_dict()


def test_shares_of_nothing_are_left_out() -> None:
    assert JudgeCounts().shares() == {}
    counts = JudgeCounts(
        {"items": 4, "items/undecided": 1, "asked": 10, "outcome/in_text": 2, "outcome/asked_again": 3}
    )
    assert counts.shares() == {"undecided_share": 0.25, "repaired_share": 0.5}
    counts.merge({"both_orders": 10, "flipped": 3, "compared/first": 12, "compared/second": 4, "compared/tie": 4})
    assert counts.shares() == {
        "undecided_share": 0.25,
        "repaired_share": 0.5,
        "position_bias": 0.3,
        "first_share": 0.75,
    }
