"""Rejection sampling: who is kept, and that every sample has one reason."""

from __future__ import annotations

from typing import Any

from tasks.filters import FilterSettings
from tasks.judge import JudgeSettings, make_judge
from tasks.rejection import funnel, select

JUDGE = make_judge(JudgeSettings(verifier="exact"))


def reasons(samples: list[Any], problems: dict[str, Any], keep: int = 2, judged: Any = ("reasoning",)) -> list[str]:
    return [s.reason for s in select(samples, problems, FilterSettings(), JUDGE, judged, keep)]


def test_rules_then_judge_then_duplicates_then_surplus(sample: Any, problem: Any) -> None:
    known = {"p": problem("p", answer="3")}
    samples = [
        sample(answer="4", accuracy=0.0),
        sample(reasoning="one"),
        sample(reasoning="one"),
        sample(answer="3.0", reasoning="the verifier lets it pass, the exact judge does not"),
        sample(reasoning="two"),
        sample(reasoning="three"),
    ]
    assert reasons(samples, known) == ["incorrect", "", "duplicate", "judged_incorrect", "", "surplus"]
    assert reasons(samples, known, judged=()) == ["incorrect", "", "duplicate", "", "surplus", "surplus"]


def test_general_samples_are_judged_for_harm(sample: Any, problem: Any) -> None:
    known = {"p": problem(domain="general", metadata={"harmful": True, "refusal": "sorry no"})}
    samples = [sample(answer="sorry, no", accuracy=None), sample(answer="at night", accuracy=None)]
    assert reasons(samples, known, judged=("general",)) == ["", "judged_unsafe"]


class Undecided:
    def correct_all(self, claims: Any) -> list[str]:
        return ["undecided" for _ in claims]


def test_undecided_is_never_kept(sample: Any, problem: Any) -> None:
    judge: Any = Undecided()
    selected = select([sample()], {"p": problem()}, FilterSettings(), judge, ("reasoning",), 2)
    assert [s.reason for s in selected] == ["judged_undecided"] and selected[0].verdict == "dropped"


def test_the_funnel_adds_up(sample: Any, problem: Any) -> None:
    samples = select([sample(), sample(accuracy=0.0), sample()], {"p": problem()}, FilterSettings(), JUDGE, (), 2)
    assert funnel(samples) == {"sampled": 3, "duplicate": 1, "incorrect": 1, "kept": 1}
