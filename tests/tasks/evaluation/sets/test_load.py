"""Test sets as problems: a small file of each known shape, and what goes wrong."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo.data.records import Problem
from grpo.errors import InputError
from grpo.rewards.verifiers import verify
from tasks.evaluation.sets.load import asked, load_set
from tasks.evaluation.sets.settings import EvaluationSet, SetData
from tasks.problems.constraints import read_constraints, share_satisfied
from tests.support.test_set_files import GPQA, write_set


def read(folder: Path, name: str, **settings: Any) -> list[Problem]:
    return load_set(SetData(name=name, path=str(write_set(folder, name)), **settings), 0).problems


def from_rows(folder: Path, name: str, *rows: dict[str, Any]) -> list[Problem]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_set(SetData(name=name, path=str(path)), 0).problems


def test_gsm8k_answers_follow_the_four_hashes(tmp_path: Path) -> None:
    problems = read(tmp_path, "gsm8k")
    assert [(p.answer, p.verifier, p.domain) for p in problems] == [
        ("7", "number", "reasoning"),
        ("2400", "number", "reasoning"),
    ]
    assert verify(problems[1], "2,400") == 1.0


def test_math_and_aime_are_compared_as_mathematics(tmp_path: Path) -> None:
    (half,) = read(tmp_path, "math500")
    assert (verify(half, "0.5"), verify(half, "0.4")) == (1.0, 0.0)
    (remainder,) = read(tmp_path, "aime2024")
    assert (remainder.answer, verify(remainder, "024"), verify(remainder, "25")) == ("24", 1.0, 0.0)


def test_gpqas_choices_are_shuffled_in_the_same_way_in_every_run(tmp_path: Path) -> None:
    problems = read(tmp_path, "gpqa_diamond")
    assert [p.text for p in problems] == [p.text for p in read(tmp_path, "gpqa_diamond")]
    for row, problem in zip(GPQA, problems, strict=True):
        assert f"\n{problem.answer}) {row['Correct Answer']}" in problem.text
        assert problem.text.count(") -1") == 1 and verify(problem, f"({problem.answer.lower()})") == 1.0
    letters = Counter(p.answer for p in problems)
    assert set(letters) == set("ABCD") and max(letters.values()) < 20  # 10 of 40 each, were it even


def test_code_runs_public_and_private_tests(tmp_path: Path) -> None:
    doubled, full = read(tmp_path, "livecodebench")
    assert doubled.metadata["tests"] == [{"stdin": "3\n", "stdout": "6\n"}, {"stdin": "5\n", "stdout": "10\n"}]
    (test,) = full.metadata["tests"]
    assert """Solution().full(*__import__("json").loads('[[1, 2], "x"]'))""" in test["assert"]
    assert "class Solution:" in full.text and "standard input" in doubled.text
    assert verify(doubled, "print(2 * int(input()))") == 1.0
    assert verify(doubled, "print(6)") == 0.0  # passes the public test alone
    assert verify(full, "class Solution:\n    def full(self, items, name):\n        return bool(items)") == 1.0


def test_packed_tests_call_nothing(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (print, ("never",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
    row = {"question_content": "q", "public_test_cases": packed}
    with pytest.raises(InputError, match=r"line 1: public_test_cases holds no list of tests: names builtins\.print"):
        from_rows(tmp_path, "livecodebench", row)


def test_ifevals_instructions_are_our_constraints(tmp_path: Path) -> None:
    result = load_set(SetData(name="ifeval", path=str(write_set(tmp_path, "ifeval"))), 0)
    (problem,) = result.problems
    assert (problem.domain, problem.verifier) == ("general", "none")
    assert problem.metadata["constraints"] == [
        {"kind": "words", "runs": True, "min": 3},
        {"kind": "excludes", "words": ["cat"]},
        {"kind": "ends_with", "text": "Done.", "quoted": True},
    ]
    assert len(result.bad_records) == 1 and "'combination:two_responses' cannot be checked" in result.bad_records[0]


IFEVALS = [
    ("keywords:existence", {"keywords": ["river"]}, "Rivers flow", "The sea"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "well-known", "It's well-known"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "1. a\n2. b\n* c", "- a\n* b"),
    ("detectable_format:json_format", {}, "```JSON\n{}```", "It is {}"),
    ("startend:end_checker", {"end_phrase": "The end. "}, '"This is the end."', '"The end." I hope'),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "A CAT"),
]


@pytest.mark.parametrize(("name", "options", "kept", "broken"), IFEVALS)
def test_a_response_is_checked_as_by_ifevals_own_program(
    tmp_path: Path, name: str, options: dict[str, Any], kept: str, broken: str
) -> None:
    row = {"prompt": "q", "instruction_id_list": [name], "kwargs": [options]}
    (problem,) = from_rows(tmp_path, "ifeval", row)
    constraints = read_constraints(problem.metadata)
    assert [share_satisfied(constraints, text) for text in (kept, broken)] == [1.0, 0.0]


def languages(folder: Path, *codes: str) -> SetData:
    rows = [
        {"prompt": f"In {c}?", "instruction_id_list": ["language:response_language"], "kwargs": [{"language": c}]}
        for c in codes
    ]
    path = folder / "languages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SetData(name="ifeval", path=str(path))


def test_a_prompt_in_a_language_that_cannot_be_recognized_is_left_out_and_counted(tmp_path: Path) -> None:
    result = load_set(languages(tmp_path, "kn", "de", "sw"), 0)
    assert [problem.text for problem in result.problems] == ["In de?"] and result.counts["bad_records"] == 2
    assert "languages.jsonl, line 1: " in result.bad_records[0] and "language 'kn'" in result.bad_records[0]


def test_such_a_prompt_of_an_earlier_version_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    german, hindi = load_set(languages(tmp_path, "de", "hi"), 0).problems
    kannada = dataclasses.replace(german, metadata={"constraints": [{"kind": "language", "language": "kn"}]})
    chosen = asked(EvaluationSet(name="ifeval", problems=2), [kannada, german, hindi])
    assert [problem.text for problem in chosen] == ["In de?", "In hi?"]
    assert "test set 'ifeval'" in caplog.text and "language 'kn'" in caplog.text


def test_another_set_of_a_known_shape_and_one_with_its_own_columns(tmp_path: Path) -> None:
    path = write_set(tmp_path, "gsm8k")
    assert load_set(SetData(name="ours", like="gsm8k", path=str(path)), 0).problems[0].answer == "7"
    own: Any = {"kind": "file", "path": str(path), "prompt_column": "question", "verifier": "exact"}
    assert load_set(SetData(name="own", source=own), 0).problems[0].verifier == "exact"
    made: Any = {"kind": "reasoning_gym", "family": "chain_sum", "count": 5}
    assert load_set(SetData(name="sums", source=made), 0).problems[0].verifier == "reasoning_gym"


def test_a_folder_with_a_split_of_its_own_stands_for_the_hub(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list([{"question": "2?", "answer": "2"}]),
            "test": datasets.Dataset.from_list(rows),
        }
    ).save_to_disk(tmp_path / "set")
    assert [p.answer for p in load_set(SetData(name="gsm8k", path=str(tmp_path / "set")), 0).problems] == ["2"]


def test_rows_of_the_hub_that_contradict_each_other_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody here can mend them. In a file of the user's own they are an error."""
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "1 + 1?", "answer": "#### 3"}]
    with pytest.raises(InputError, match="has the answer '3', but '2' at"):
        from_rows(tmp_path, "gsm8k", *rows)
    of_hub = (("row 1", rows[0]), ("row 2", rows[1]))
    monkeypatch.setattr("tasks.problems.files.dataset_rows", lambda *_: iter(of_hub))
    result = load_set(SetData(name="gsm8k"), 0)
    assert [problem.answer for problem in result.problems] == ["2"] and result.counts["bad_records"] == 1


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "gsm8k",
            {"prompt": "q", "answer": "1"},
            "line 1: column 'question' is missing; the columns are prompt, answer",
        ),
        ("gpqa_diamond", {"Question": "q", "Correct Answer": "a"}, "line 1: column 'Incorrect Answer 1' is missing"),
        (
            "livecodebench",
            {"question_content": "q", "public_test_cases": "[]"},
            "public_test_cases is .*; a list of tests",
        ),
        ("ifeval", {"prompt": "q", "instruction_id_list": ["x"], "kwargs": []}, "lists of one length"),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path: Path, name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^test set '{name}': .*{message}"):
        from_rows(tmp_path, name, row)


def test_an_empty_set_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(InputError, match="^test set 'gsm8k': .*there are no rows"):
        load_set(SetData(name="gsm8k", path=str(tmp_path / "none.jsonl")), 0)


def test_prompt_and_answer_styles(tmp_path: Path) -> None:
    problems = read(tmp_path, "gsm8k")

    def first(**settings: Any) -> str:
        return asked(EvaluationSet(name="gsm8k", **settings), problems)[0].text

    question = problems[0].text
    assert first() == question
    instruction = "\n\nPlease reason step by step, and put your final answer "
    assert first(prompt_style="instruction", answer_style="boxed") == question + instruction + r"within \boxed{}."
    assert first(prompt_style="instruction") == question + instruction + "between <answer> and </answer>."
    assert first(prompt_style="Q: {question}\nA:") == f"Q: {question}\nA:"
    assert len(asked(EvaluationSet(name="gsm8k", problems=1), problems)) == 1
    choices = asked(EvaluationSet(name="gpqa_diamond", prompt_style="instruction"), read(tmp_path, "gpqa_diamond"))
    assert choices[0].text.endswith("put the letter of the right choice between <answer> and </answer>.")
