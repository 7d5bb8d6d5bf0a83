"""The answers of rows: which are kept, and which are bad records with their place, in a file or beside another row."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from grpo.rewards.reasoning_gym import pack_entry
from grpo.validate import validate
from tests.support.problem_files import failure, from_file


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


# --- the number after ####


@pytest.mark.parametrize(
    ("final", "answer"),
    [
        ("1,234", "1234"),
        ("-1,234,567.5", "-1234567.5"),
        ("$1,234", "$1234"),
        ("1,234 hens", "1234 hens"),
        ("(1,2)", "(1,2)"),
        ("(1,200)", "(1,200)"),
        ("1, 2", "1, 2"),
        ("[0,1)", "[0,1)"),
    ],
)
def test_only_commas_between_thousands_are_removed(path: Path, final: str, answer: str) -> None:
    write(path, {"prompt": "a?", "answer": f"So.\n#### {final}"})
    assert from_file(path).problems[0].answer == answer


# --- gold answers that cannot be used


UNUSABLE = ["\\frac{1}{", "???", "\\boxed{}", "$$", "1/0"]


def test_golds_of_math_that_cannot_be_used_are_bad_records(path: Path) -> None:
    golds = ["42", *UNUSABLE, "Evelyn", "(-\\infty, 3]", "5!", "\\text{no solution}"]
    write(path, *({"prompt": f"{n}?", "answer": gold} for n, gold in enumerate(golds)))
    result = from_file(path, on_bad_record="skip")
    assert [problem.answer for problem in result.problems] == [gold for gold in golds if gold not in UNUSABLE]
    assert [fault.split(": ")[0] for fault in result.bad_records] == [f"{path}, line {n}" for n in range(2, 7)]
    assert failure(path).startswith(f"{path}, line 2: problem '1?': the gold answer")


@pytest.mark.parametrize("gold", ["42!!", "9^{9^{9}}"])
def test_a_gold_of_math_that_takes_for_ever_is_a_bad_record(
    path: Path, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.problems.load.validate", functools.partial(validate, time_limit_s=2.0))
    write(path, {"prompt": "a?", "answer": gold}, {"prompt": "b?", "answer": "2"})
    result = from_file(path, on_bad_record="skip")
    assert [problem.text for problem in result.problems] == ["b?"]
    assert result.bad_records == [f"{path}, line 1: problem 'a?': timeout: no result within 2 s"]


def test_two_values_are_no_number(path: Path) -> None:
    write(path, {"prompt": "a?", "answer": "x = 41 or x = 42"})
    assert "line 1: answer 'x = 41 or x = 42' is not right by its own verifier" in failure(path, verifier="number")


def test_no_process_starts_for_plain_golds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.validate.Pool", None)
    golds = ["42", "\\frac{3\\sqrt{2}}{2}", "x^2+1", "(1,2)"]
    write(path, *({"prompt": f"{n}?", "answer": gold} for n, gold in enumerate(golds)))
    assert from_file(path).counts["kept"] == len(golds)


# --- rows that name a verifier, or a family of reasoning-gym


def test_a_list_is_no_verifier(path: Path) -> None:
    write(path, {"prompt": "a?", "answer": "2", "by": ["math"]}, {"prompt": "b?", "answer": "2", "by": "math"})
    assert "line 1: by: unknown verifier ['math']; known are " in failure(path, verifier_column="by")
    assert from_file(path, verifier_column="by", on_bad_record="skip").counts["bad_records"] == 1


ENTRY = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
GYM = {"prompt": ENTRY["question"], "answer": ENTRY["answer"], "family": "chain_sum", "entry": pack_entry(ENTRY)}
GYM_SETTINGS = {"verifier": "reasoning_gym", "metadata_columns": ["family", "entry", "parameters"]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"entry": 5}, "needs metadata['entry'], an object, not 5"),
        ({"family": ["x"]}, "needs metadata['family'], text, not ['x']"),
        ({"family": "chain_sums"}, "unknown reasoning-gym family 'chain_sums'; close: chain_sum"),
        ({"parameters": {"no_such": 1}}, "chain_sum does not accept"),
        ({"family": "sudoku", "entry": {"answer": "1"}}, "cannot be checked by verifier 'reasoning_gym' (KeyError: "),
    ],
)
def test_wrong_rows_of_reasoning_gym_are_bad_records(path: Path, wrong: dict[str, Any], message: str) -> None:
    write(path, {**GYM, "parameters": {}}, {**GYM, "parameters": {}, "prompt": "b?", **wrong})
    said = failure(path, **GYM_SETTINGS)
    assert said.startswith(f"{path}, line 2: ") and message in said
    result = from_file(path, **GYM_SETTINGS, on_bad_record="skip")
    assert (result.counts["kept"], result.bad_records) == (1, [said])


def test_a_family_that_was_not_kept_is_named_with_the_remedy(path: Path) -> None:
    write(path, GYM)
    said = failure(path, verifier="reasoning_gym")
    assert said.startswith(f"{path}, line 1: ") and "needs metadata['family']" in said
    assert said.endswith("keep the columns family and entry with metadata_columns")


# --- one prompt, two answers


@pytest.mark.parametrize("verifier", ["math", "number", "exact"])
def test_rows_that_contradict_each_other_are_named(path: Path, verifier: str) -> None:
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "b?", "answer": "3"}, {"prompt": "1  +  1?", "answer": "4"}]
    write(path, *rows)
    said = failure(path, verifier=verifier)
    assert said.startswith(f"{path}, line 3: problem '1  +  1?' has the answer '4', but '2' at {path}, line 1")
    result = from_file(path, verifier=verifier, on_bad_record="skip")
    assert [problem.answer for problem in result.problems] == ["2", "3"]
    assert result.counts == {"read": 3, "duplicates": 0, "unverifiable": 0, "bad_records": 1, "kept": 2}


@pytest.mark.parametrize(
    ("verifier", "one", "other"),
    [
        ("math", "\\frac{1}{2}", "0.5"),
        ("number", "1,000", "1000.0"),
        ("choice", "B", "(B) 42"),
        ("exact", "Paris", "paris."),
        ("judge", "a dog", "a cat"),  # two references for a judge
    ],
)
def test_the_same_answer_written_otherwise_is_a_duplicate(path: Path, verifier: str, one: str, other: str) -> None:
    write(path, *({"prompt": "a?", "answer": answer} for answer in (one, other, one)))
    result = from_file(path, verifier=verifier)
    assert [problem.answer for problem in result.problems] == [one]
    assert result.counts == {"read": 3, "duplicates": 2, "unverifiable": 0, "bad_records": 0, "kept": 1}
