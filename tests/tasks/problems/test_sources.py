"""Problem sources: every format read, every fault named with its place and remedy, and a split that never leaks."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from grpo.data.records import Problem, write_rows
from grpo.data.template import form_of
from grpo.errors import InputError
from grpo.rewards.verifiers import verify
from tasks.problems.load import drop_duplicates, load, split
from tasks.problems.sources import FileSource, HubSource, ProblemSource, ReasoningGymSource
from tests.support.problem_files import failure, from_file


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


# --- reasoning-gym


def test_reasoning_gym_problems_are_scored_by_their_family() -> None:
    result = load(ReasoningGymSource(family="chain_sum", count=50, parameters={"max_terms": 3}), seed=1)
    assert result.counts["read"] == 50
    assert result.counts["kept"] == len(result.problems) == 50 - result.counts["duplicates"]
    for problem in result.problems:
        json.dumps(problem.metadata, allow_nan=False)
        assert verify(problem, problem.answer) == 1.0
        assert verify(problem, str(int(problem.answer) + 1)) < 1.0
        expression = problem.text.split(":")[1].split("=")[0]
        assert str(eval(expression)) == problem.answer  # digits, + and -


def test_reasoning_gym_depends_on_seed_and_offset_only() -> None:
    def texts(seed: int, offset: int) -> list[str]:
        source = ReasoningGymSource(family="chain_sum", count=50, seed_offset=offset, parameters={"min_digits": 4})
        return [p.text for p in load(source, seed).problems]

    assert texts(1, 0) == texts(1, 0)
    assert not set(texts(1, 0)) & set(texts(2, 0))
    assert not set(texts(1, 0)) & set(texts(1, 1))


def test_duplicates_are_dropped_and_counted() -> None:
    # One-digit numbers leave few sums of two terms.
    source = ReasoningGymSource(
        family="chain_sum", count=500, parameters={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    counts = load(source, seed=0).counts
    assert counts["read"] == 500 == counts["kept"] + counts["duplicates"]
    assert 100 < counts["kept"] <= 200  # 10 x 10 pairs, two signs


def test_prompt_in_another_language() -> None:
    source = ReasoningGymSource(family="chain_sum", count=3, language="zh", prompt="计算：{expression} = ?")
    for problem in load(source, seed=0).problems:
        assert problem.language == "zh"
        assert problem.text.startswith("计算：") and problem.text.endswith(" = ?")
        assert str(eval(problem.text[3:-4])) == problem.answer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "chain_summ"}, "unknown reasoning-gym family 'chain_summ'; close: chain_sum"),
        ({"parameters": {"max_term": 3}}, "chain_sum has no parameter 'max_term'; close: max_terms"),
        ({"parameters": {"seed": 3}}, "chain_sum has no parameter 'seed'"),
        ({"parameters": {"max_terms": 0}}, "max_terms must be >= min_terms"),
        ({"parameters": {"max_terms": "four"}}, "does not accept {'max_terms': 'four'}"),
        ({"prompt": "{expresion}"}, "chain_sum has no field 'expresion'; the fields are difficulty, expression,"),
        ({"prompt": "{expression"}, "is not a format string"),
    ],
)
def test_reasoning_gym_faults(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(ReasoningGymSource(**{"family": "chain_sum", "count": 3, **settings}), seed=0)
    assert message in str(caught.value)


# --- files


def test_jsonl(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", '{"prompt": "1+1?", "answer": 2, "level": 3}', "", '{"prompt": "é", "answer": "x"}'
    )
    result = from_file(path, metadata_columns=[])
    assert [(p.text, p.answer, p.verifier, p.domain, p.source) for p in result.problems] == [
        ("1+1?", "2", "math", "reasoning", "file/a.jsonl"),
        ("é", "x", "math", "reasoning", "file/a.jsonl"),
    ]
    assert result.counts == {"read": 2, "duplicates": 0, "unverifiable": 0, "bad_records": 0, "kept": 2}
    assert from_file(path, metadata_columns=["level"], limit=1).problems[0].metadata == {"level": 3}


@pytest.mark.parametrize("answer", ["NaN", "-Infinity", '"nan"', '"inf"'])
def test_nan_and_infinity_are_no_gold_answers(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "1+1?", "answer": {answer}}}')
    with pytest.raises(
        InputError, match=r"a\.jsonl, line 1: answer is .*, which is no number: mostly a cell"
    ) as caught:
        from_file(path, verifier="math")
    assert "\n" not in str(caught.value)
    if not answer.startswith('"'):  # as text it may be a word
        with pytest.raises(InputError, match="which is no number"):
            from_file(path, verifier="exact")


def test_constraints_are_checked_when_they_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "name a cat", "constraints": c} for c in ([{"kind": "words", "max": 3}], [{"kind": "word"}])]
    path = write(tmp_path / "a.jsonl", *(json.dumps(row) for row in rows))
    settings: dict[str, Any] = {"domain": "general", "verifier": "none", "metadata_columns": ["constraints"]}
    assert from_file(path, limit=1, **settings).problems[0].metadata["constraints"] == [{"kind": "words", "max": 3}]
    assert failure(path, **settings).startswith(f"{path}, line 2: constraints.0: ")


def test_a_row_may_have_its_own_answer_style(tmp_path: Path) -> None:
    row = '{"question": "What is 1 + 1?", "answer": "2", "answer_style": "STYLE"}'
    keep = {"metadata_columns": ["answer_style"]}
    [problem] = from_file(write(tmp_path / "own.jsonl", row.replace("STYLE", "boxed")), **keep).problems
    assert form_of(problem).style == "boxed"
    path = write(tmp_path / "own.jsonl", row.replace("STYLE", "box"))
    assert failure(path, **keep) == f"{path}, line 1: answer_style is 'box'; known are tags, boxed, auto"


def test_gsm8k_needs_no_configuration(tmp_path: Path) -> None:
    row = {"question": "A farm has 1,250 hens.", "answer": "It has <<1000+250=1250>>1250.\n#### 1,250"}
    assert from_file(write(tmp_path / "a.jsonl", json.dumps(row))).problems[0].answer == "1250"


def test_messages(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": messages, "answer": "2"}))
    problem = from_file(path).problems[0]
    assert problem.messages == messages[:2]  # the assistant's last turn would give the answer away
    assert problem.text == "1+1?"


def test_csv_and_parquet_give_the_same_problems(tmp_path: Path) -> None:
    rows = [{"prompt": "a, b\nand c?", "answer": "1"}, {"prompt": 'say "d"', "answer": "2"}]
    csv = write(tmp_path / "a.csv", "prompt,answer", '"a, b\nand c?",1', '"say ""d""",2')
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = [(p.text, p.answer) for p in from_file(csv).problems]
    assert texts == [(p.text, p.answer) for p in from_file(tmp_path / "a.parquet").problems]
    assert texts == [(row["prompt"], row["answer"]) for row in rows]


def test_general_prompts_need_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "Write a poem."}')
    assert from_file(path, verifier="none", domain="general").problems[0].answer == ""


def test_ids_are_stable_and_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    line = '{"prompt": "1+1?", "answer": "2"}'
    first = from_file(write(tmp_path / "a.jsonl", line)).problems[0].id
    assert first == from_file(write(tmp_path / "b" / "a.jsonl", line)).problems[0].id
    assert first == hashlib.sha256(b'["file/a.jsonl", "1+1?", "2"]').hexdigest()[:16]
    assert first != from_file(write(tmp_path / "a.jsonl", line.replace("2", "3"))).problems[0].id


GOOD = '{"prompt": "1+1?", "answer": "2"}'


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ([GOOD, '{"prompt": "1+'], {}, "line 2: not JSON: Unterminated string"),
        ([GOOD, b'{"prompt": "\xff", "answer": "2"}'], {}, "line 2: byte 0xff at column 13 is not UTF-8"),
        (["[", GOOD, "]"], {}, "line 1: a JSON array; one object a line is needed: jq -c '.[]' a.jsonl"),
        (['"text"'], {}, "line 1: 'text' is no object"),
        (["[" * 100_000], {}, "line 1"),
        ([GOOD, "[" * 100_000], {}, "line 2"),
        (['{"prompt": "a", "answer": ' + "1" * 5000 + "}"], {}, "line 1: not usable JSON"),
        (
            ['{"text": "a", "answer": "2"}'],
            {},
            "column 'prompt' is missing; the columns are text, answer; set prompt_c",
        ),
        (['{"prompt": "a"}'], {}, "column 'answer' is missing; the columns are prompt; set answer_column"),
        ([GOOD], {"metadata_columns": ["level"]}, "column 'level' is missing"),
        ([GOOD, '{"prompt": "  ", "answer": "2"}'], {}, "line 2: prompt is blank"),
        (['{"prompt": "a", "answer": ""}'], {}, "line 1: answer is blank"),
        (['{"prompt": 7, "answer": "2"}'], {}, "line 1: prompt is 7, a int; text is needed"),
        (['{"prompt": "a", "answer": null}'], {}, "line 1: answer is None, a NoneType"),
        (['{"prompt": "a", "answer": true}'], {}, "line 1: answer is True, a bool"),
        (['{"prompt": "\\ud800", "answer": "2"}'], {}, "half a surrogate pair"),
        (['{"prompt": [{"role": "bot"}], "answer": "2"}'], {}, "a message is {role, content}"),
        (['{"prompt": [{"role": "user"}], "answer": "2"}'], {}, "prompt is None"),
        (['{"prompt": [], "answer": "2"}'], {}, "no message of role user"),
        (['{"prompt": "a", "answer": "seven"}'], {"verifier": "number"}, "'seven' is not right by its own verifier"),
        (["", ""], {}, "there are no rows"),
        (
            [GOOD, '{"prompt": "a", "answer": "2", "by": "maths"}'],
            {"verifier_column": "by"},
            "line 1: column 'by' is missing",
        ),
        (
            ['{"prompt": "a", "answer": "2", "by": "maths"}'],
            {"verifier_column": "by"},
            "line 1: by: unknown verifier 'maths'; known are ",
        ),
        (['{"prompt": "a", "by": "none"}'], {"verifier_column": "by"}, "line 1: by: verifier 'none' is for domain"),
    ],
)
def test_jsonl_faults(tmp_path: Path, lines: list[str | bytes], settings: dict[str, Any], message: str) -> None:
    assert message in failure(write(tmp_path / "a.jsonl", *lines), **settings)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["prompt,answer", "a,1", "b"], "line 3: 1 cells under a header of 2"),
        (["prompt,answer", "a,1,2"], "line 2: 3 cells under a header of 2; quote cells with commas"),
        (["prompt,prompt", "a,1"], "line 1: column 'prompt' stands twice"),
        (["prompt,answer", '"a,1'], "line 2: not CSV"),
        (["prompt,answer", b"\xe9,1"], "line 2: byte 0xe9 at column 1 is not UTF-8"),
        (["prompt,answer"], "there are no rows"),
    ],
)
def test_csv_faults(tmp_path: Path, lines: list[str | bytes], message: str) -> None:
    assert message in failure(write(tmp_path / "a.csv", *lines))


def test_file_faults(tmp_path: Path) -> None:
    assert "no such file" in failure(tmp_path / "a.jsonl")
    assert "the file is empty" in failure(write(tmp_path / "empty.jsonl"))
    assert "'.txt' is not supported; use .jsonl, .json, .parquet, .csv" in failure(write(tmp_path / "a.txt", "x"))
    (tmp_path / "folder.parquet").mkdir()
    assert "is a folder" in failure(tmp_path / "folder.parquet")
    assert "not a readable parquet file" in failure(write(tmp_path / "a.parquet", "PAR1 but not really"))
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "b.parquet")
    assert "b.parquet, row 1: column 'answer' is missing" in failure(tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[: len(whole) // 2])
    assert "not a readable parquet file" in failure(tmp_path / "c.parquet")


def test_bad_records_are_skipped_and_counted_if_asked(tmp_path: Path) -> None:
    lines: list[str | bytes] = [
        GOOD,
        '{"prompt": "1+',
        b'{"prompt": "\xff", "answer": "2"}',
        '{"prompt": "2+2?"}',
        '{"prompt": 7, "answer": "2"}',
        '{"prompt": "3+3?", "answer": "6"}',
    ]
    result = from_file(write(tmp_path / "a.jsonl", *lines), on_bad_record="skip")
    assert [problem.text for problem in result.problems] == ["1+1?", "3+3?"]
    assert result.counts == {"read": 6, "duplicates": 0, "unverifiable": 0, "bad_records": 4, "kept": 2}
    faults = ["not JSON", "byte 0xff at column 13", "column 'answer' is missing", "prompt is 7, a int"]
    for number, (found, expected) in enumerate(zip(result.bad_records, faults, strict=True), 2):
        assert found.startswith(f"{tmp_path}/a.jsonl, line {number}: ") and expected in found


def test_half_a_surrogate_pair_in_metadata_is_a_bad_record(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", GOOD[:-1] + ', "note": ["\\ud83d"]}', '{"prompt": "a", "answer": "2", "note": "b"}'
    )
    said = f"{path}, line 1: note holds half a surrogate pair, which is no text; write it anew"
    assert failure(path, metadata_columns=["note"]) == said
    result = from_file(path, metadata_columns=["note"], on_bad_record="skip")
    assert [problem.text for problem in result.problems] == ["a"] and result.bad_records == [said]
    write_rows(tmp_path / "a.parquet", result.problems, Problem)


def test_a_csv_cell_may_be_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,answer", "a" * 200_000 + ",1", "b,2")
    assert [len(problem.text) for problem in from_file(path).problems] == [200_000, 1]


def test_bad_csv_records_are_skipped_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt,answer", "a,1", "b", b'"c\xe9\nd",2', "e,3")
    result = from_file(path, on_bad_record="skip")
    assert [problem.text for problem in result.problems] == ["a", "e"]
    assert [fault.split(": ")[0].rpartition(", ")[2] for fault in result.bad_records] == ["line 3", "line 4"]


def test_nothing_but_bad_records_is_an_error_that_shows_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}', '{"text": "b"}')
    said = failure(path, on_bad_record="skip")
    assert "no problem left of 2 read, 2 of them bad records, the first: " in said and "line 1: column 'answer'" in said


def test_rows_may_name_their_verifier(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "a", "answer": "x", "by": "exact"}', GOOD[:-1] + ', "by": ""}')
    assert [problem.verifier for problem in from_file(path, verifier_column="by").problems] == ["exact", "math"]


# --- data sets


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_local_data_sets(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "files" / "train.parquet")
    for folder in ("one", "splits", "files"):
        problems = load(HubSource(name=str(tmp_path / folder)), seed=0).problems
        assert [(p.text, p.answer) for p in problems] == [("1+1?", "2"), ("2+2?", "4")]
        assert problems[0].source == f"dataset/{folder}/train"
    assert load(HubSource(name=str(tmp_path / "splits"), split="test"), seed=0).counts["kept"] == 1
    with pytest.raises(InputError, match="no split 'dev'; the splits are train, test"):
        load(HubSource(name=str(tmp_path / "splits"), split="dev"), seed=0)
    with pytest.raises(InputError, match="cannot be read: .*Unknown split"):
        load(HubSource(name=str(tmp_path / "files"), split="dev"), seed=0)


@pytest.mark.usefixtures("offline")
def test_hub_without_network_is_one_line() -> None:
    with pytest.raises(InputError, match="data set 'nobody/nothing' cannot be read: .*give a folder") as caught:
        load(HubSource(name="nobody/nothing"), seed=0)
    assert "\n" not in str(caught.value)


# --- configuration


def test_sources_are_told_apart_by_kind() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ProblemSource)
    source = adapter.validate_python({"kind": "file", "path": "a.csv", "verifier": "exact"})
    assert source == FileSource(path=Path("a.csv"), verifier="exact")
    for wrong in (
        {"kind": "files", "path": "a.csv"},
        {"kind": "file", "path": "a.csv", "colum": "x"},
        {"kind": "file", "path": "a.csv", "verifier": "maths"},
        {"kind": "file", "path": "a.csv", "verifier": "none"},
        {"kind": "reasoning_gym", "family": "chain_sum", "count": 0},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


# --- duplicates and the split


def problem(text: str, id: str = "", source: str = "s") -> Problem:
    return Problem(id or text, [{"role": "user", "content": text}], "1", "exact", "reasoning", "en", source)


def test_the_same_text_is_one_problem() -> None:
    unique, dropped = drop_duplicates([problem("One  two"), problem("one two\n"), problem("x²"), problem("x2")])
    assert [p.text for p in unique] == ["One  two", "x²", "x2"]
    assert dropped == 1


def test_split_is_by_text_whatever_order_and_source() -> None:
    problems = [problem(f"problem {i}") for i in range(1000)]
    train, held_out = split(problems, 0.2, "salt")
    assert [*train, *held_out] != problems and len(train) + len(held_out) == 1000
    assert 150 < len(held_out) < 250  # 200 expected, standard deviation 12.6
    again = [problem(f"PROBLEM   {i}", source="other") for i in range(1000)]
    random.Random(0).shuffle(again)
    train_again, held_out_again = split(again, 0.2, "salt")
    assert {p.text.lower().replace("   ", " ") for p in held_out_again} == {p.text for p in held_out}
    assert {p.text.lower().replace("   ", " ") for p in train_again} == {p.text for p in train}
    assert split(problems, 0.2, "other salt")[1] != held_out
    assert split(problems, 0.0, "salt") == (problems, []) and split(problems, 1.0, "salt") == ([], problems)


def test_surplus_held_out_is_dropped_never_trained_on() -> None:
    problems = [problem(f"problem {i}") for i in range(1000)]
    train, held_out = split(problems, 0.2, "salt")
    capped_train, capped = split(problems[::-1], 0.2, "salt", held_out_max=10)
    assert len(capped) == 10 and {p.id for p in capped} < {p.id for p in held_out}
    assert capped_train == train[::-1]


def test_too_few_held_out_is_an_error() -> None:
    problems = [problem(f"problem {i}") for i in range(10)]
    assert len(split(problems, 1.0, "salt", held_out_min=10)[1]) == 10
    with pytest.raises(InputError, match="10 of 10 problems are held out, fewer than held_out_min 11; raise"):
        split(problems, 1.0, "salt", held_out_min=11)
    with pytest.raises(InputError, match="held_out_share is 2"):
        split(problems, 2, "salt")


# --- code


DOUBLE = {"prompt": "Print twice the number.", "tests": [{"stdin": "4", "stdout": "8"}]}


def test_a_code_problem_needs_tests_and_no_answer(tmp_path):
    path = write(tmp_path / "code.jsonl", json.dumps(DOUBLE))
    (problem,) = from_file(path, verifier="code", metadata_columns=["tests"]).problems
    assert problem.metadata["tests"] == DOUBLE["tests"]
    assert verify(problem, "print(2 * int(input()))") == 1.0
    assert verify(problem, "print(3 * int(input()))") == 0.0


def test_a_code_problem_without_tests_is_named(tmp_path):
    path = write(tmp_path / "code.jsonl", json.dumps(DOUBLE | {"tests": [{"stdin": "4"}]}))
    assert failure(path, verifier="code", metadata_columns=["tests"]).startswith(
        f"{path}, line 1: code tests: test 0 must be"
    )
    assert "keep their column with metadata_columns" in failure(path, verifier="code")


def test_a_reference_solution_that_fails_its_tests_is_named(tmp_path):
    right, wrong = (DOUBLE | {"answer": f"print({n} * int(input()))", "prompt": f"times {n}"} for n in (2, 3))
    path = write(tmp_path / "code.jsonl", json.dumps(right), json.dumps(wrong))
    message = failure(path, verifier="code", metadata_columns=["tests"])
    skipping = {"verifier": "code", "metadata_columns": ["tests"], "on_bad_record": "skip"}
    assert [problem.text for problem in from_file(path, **skipping).problems] == ["times 2"]
    assert "'times 3'" in message or '"times 3"' in message
    assert "scores 0" in message
