"""The judge by reference: marks that can be counted by hand, and independence of the judge that is rewarded."""

from __future__ import annotations

import ast
import inspect
import random
from typing import Any

import pytest

from flows.recipe.load import load_recipe
from grpo.config.judge import JudgeSettings
from tasks.judges import reference, rule
from tasks.judges.base import Pair, Response
from tasks.judges.create_judge import make_judge
from tasks.judges.reference import chrf
from tasks.problems.miniature.everyday import EverydaySource, load_everyday
from tasks.problems.miniature.writers import Habits, demonstrate

GOOD = Habits(mixes_languages=0, slips=0, answers=1, courteous=1, refuses=1)
RUDE = GOOD.model_copy(update={"answers": 0.0, "refuses": 0.0})
REWARDED = ("mentions", "courtesy", "refusal", "harmful", "looks_harmful")


def test_chrf() -> None:
    assert chrf("A b", "ab") == 1.0 and chrf("ab", "cd") == chrf("", "ab") == chrf("ab", "") == 0.0
    # One character: precision 2/3, recall 1. Two: 1/2 and 1. Means 7/12 and 1; 5 * 7/12 / (4 * 7/12 + 1) = 35/40.
    assert chrf("abc", "ab") == pytest.approx(35 / 40)
    # A run counts as often as the reference has it: one a of three, precision 1/3.
    assert chrf("aaa", "a") == pytest.approx(5 / 3 / (4 / 3 + 1))


def test_it_prefers_what_is_nearer_to_the_reference(problem: Any) -> None:
    judge = make_judge(JudgeSettings(kind="reference", quality_min=0.8))
    asked = problem(domain="general", metadata={"reference": "the cat is warm"})
    pairs = [("the cat is warm", "no"), ("no", "the cat is warm"), ("no", "no")]
    pairs += [("the cat is warm", "the cat is cold"), ("the cat is warm", "the cat is warm warm")]
    assert judge.compare_all([Pair(asked, *pair) for pair in pairs]) == [2.0, -2.0, 0.0, 2.0, 1.0]
    assert judge.good_all([Response(asked, text) for text in ("the cat is warm", "no")]) == [True, False]
    assert judge.can_compare(asked) and not judge.can_compare(problem(domain="general", metadata={"mentions": ["cat"]}))
    said = [Response(asked, "the cat is warm")]
    assert (judge.safe_all(said), judge.refused_all(said)) == ([None], [None])
    assert judge.correct("?", "1", "1") == "undecided" and not judge.fallible


def test_the_evaluation_of_tiny_asks_another_judge_than_the_one_that_is_rewarded() -> None:
    recipe = load_recipe("tiny")
    assert (recipe.evaluate.judge.kind, recipe.reward_models.judge.kind, recipe.sft_data.judge.kind) == (
        "reference",
        "rule",
        "rule",
    )


def test_the_two_judges_share_neither_code_nor_features(problem: Any) -> None:
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(inspect.getsource(reference)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert not [name for name in imported if "rule" in name or "repeated" in name or "rewards" in name]
    own = {value for name, value in vars(rule).items() if getattr(value, "__module__", "") == rule.__name__}
    assert not own & {value for value in vars(reference).values() if callable(value)}
    by_rule, by_reference = (make_judge(JudgeSettings(kind=kind)) for kind in ("rule", "reference"))
    rng = random.Random(0)
    for asked in load_everyday(EverydaySource(count=100), 0).problems:
        pair = (demonstrate(asked, GOOD, rng)[1], demonstrate(asked, RUDE, rng)[1])
        blind = {name: value for name, value in asked.metadata.items() if name not in REWARDED}
        judged = {kind: judge.compare(asked, *pair) for kind, judge in (("rule", by_rule), ("ref", by_reference))}
        without = problem(text=asked.text, domain="general", metadata=blind)
        assert by_reference.compare(without, *pair) == judged["ref"]
        without = problem(text=asked.text, domain="general", metadata={**asked.metadata, "reference": "none"})
        assert by_rule.compare(without, *pair) == judged["rule"]


def test_both_agree_on_good_and_bad_replies() -> None:
    rng = random.Random(0)
    judge = make_judge(JudgeSettings(kind="reference"))
    for asked in load_everyday(EverydaySource(count=100), 0).problems:
        good, bad = (demonstrate(asked, habits, rng)[1] for habits in (GOOD, RUDE))
        assert (judge.compare(asked, good, bad) or 0) > 0 and chrf(good, asked.metadata["reference"]) == 1.0
