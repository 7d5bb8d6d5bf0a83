"""Mix settings: how large each part is to be, what belongs to it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grpo.errors import InputError
from tasks.sft_data.mix_settings import NO_PART, MixSettings

PAPER = {"math": 395_285, "code": 211_129, "stem": 10_124, "logic": 10_395, "general": 177_812}


def settings(parts: dict[str, dict[str, Any]], **rest: Any) -> MixSettings:
    return MixSettings.model_validate({"parts": parts, **rest})


def test_the_papers_shares_give_its_counts_at_its_total_and_scale_to_any_other() -> None:
    parts = {name: {"sources": [name], "share": share} for name, share in PAPER.items()}
    assert settings(parts, total=804_745).wanted() == PAPER
    assert settings(parts, total=1000).wanted() == {"math": 491, "code": 262, "stem": 13, "logic": 13, "general": 221}


def test_largest_remainders_go_first_and_equal_ones_by_name() -> None:
    parts = {name: {"sources": [name], "share": share} for name, share in {"c": 1, "b": 1, "a": 1}.items()}
    assert settings(parts, total=11).wanted() == {"c": 3, "b": 4, "a": 4}  # 3.67 each: two are left over
    parts = {"a": {"sources": ["a"], "share": 0.3}, "b": {"sources": ["b"], "share": 0.7}}
    assert settings(parts, total=9).wanted() == {"a": 3, "b": 6}  # 2.7 and 6.3


def test_counts_are_taken_off_the_total_before_it_is_shared() -> None:
    parts = {
        "a": {"sources": ["a"], "count": 10},
        "b": {"sources": ["b"], "share": 1},
        "c": {"sources": ["c"], "share": 3},
    }
    assert settings(parts, total=50).wanted() == {"a": 10, "b": 10, "c": 30}
    assert settings(parts).wanted() == {"a": 10, "b": None, "c": None}


def test_a_source_goes_before_a_domain_whatever_the_order() -> None:
    for order in (("sums", "rest"), ("rest", "sums")):
        parts = {"sums": {"sources": ["reasoning_gym/*"]}, "rest": {"domains": ["reasoning"]}}
        made = settings({name: parts[name] for name in order})
        assert made.part_of("reasoning_gym/chain_sum", "reasoning") == "sums"
        assert made.part_of("file/gsm8k.jsonl", "reasoning") == "rest"
        assert made.part_of("everyday", "general") == NO_PART


def test_a_source_in_two_parts_is_an_error() -> None:
    made = settings({"a": {"sources": ["file/*"]}, "b": {"sources": ["*.csv"]}})
    with pytest.raises(InputError, match=r"source 'file/x.csv' is in parts 'a' and 'b'"):
        made.part_of("file/x.csv", "reasoning")


def test_a_name_is_itself_also_where_it_looks_like_a_pattern() -> None:
    assert settings({"a": {"sources": ["file/x[1].csv"]}}).part_of("file/x[1].csv", "reasoning") == "a"


def test_which_examples_keep_their_chain_of_thought() -> None:
    by_rule = {rule: MixSettings.model_validate({"think": rule}) for rule in ("always", "never")}
    by_rule["list"] = MixSettings(think=["dataset/essays/*"])
    asked = (("dataset/essays/train", "general"), ("everyday", "general"), ("everyday", "reasoning"))
    kept = {name: [made.keeps_thought(*a) for a in asked] for name, made in by_rule.items()}
    assert kept == {"always": [True, True, True], "never": [False, False, True], "list": [True, False, True]}


def test_a_licence_by_name_goes_before_one_by_pattern() -> None:
    made = MixSettings(licences={"file/*": "MIT", "file/a.csv": "CC-BY-4.0", "file/a*": "CC0-1.0"})
    assert [made.licence(f"file/{name}") for name in ("a.csv", "ab.csv", "c.csv")] == ["CC-BY-4.0", "CC0-1.0", "MIT"]
    assert made.licence("everyday") == "unknown"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"parts": {"a": {}}}, "a part needs sources or domains, not both"),
        ({"parts": {"a": {"sources": ["x"], "domains": ["general"]}}}, "a part needs sources or domains, not both"),
        ({"parts": {"a": {"sources": ["x"], "share": 1, "count": 1}}}, "give share or count, not both"),
        ({"parts": {"a": {"sources": ["x"]}}, "total": 5}, "part 'a' needs share or count, because total is 5"),
        ({"parts": {"a": {"sources": ["x"], "count": 6}}, "total": 5}, "add up to 6, more than the total 5"),
        ({"parts": {"a": {"sources": ["x"]}, "b": {"sources": ["x"]}}}, "sources: 'x' is in two parts"),
        ({"parts": {"a": {"domains": ["general"]}, "b": {"domains": ["general"]}}}, "'general' is in two parts"),
        ({"parts": {"a b": {"sources": ["x"]}}}, "part name 'a b'"),
        ({"parts": {}}, "at least 1 item"),
        ({"validation_share": 1}, "less than 1"),
        ({"think": "sometimes"}, "'always' or 'never'"),
    ],
)
def test_what_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        MixSettings.model_validate(values)
    assert said in str(error.value)
