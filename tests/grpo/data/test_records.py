"""Shards of problems and samples: what is written is read again, and what is wrong in a file is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.data.records import Problem, Sample, read_problems, read_samples, write_rows
from grpo.errors import InputError

MESSAGES = [{"role": "user", "content": "1+1?"}]
PROBLEM = Problem("p1", MESSAGES, "2", "number", "reasoning", "en", "test", {"level": 1})
ROW: dict[str, Any] = {
    **{"id": "p1", "messages": MESSAGES, "answer": "2", "verifier": "number", "domain": "reasoning"},
    **{"language": "en", "source": "test", "metadata": "{}"},
}


def test_problems_and_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    sample = Sample("p1", "tiny", "<think>", "", "", "2", {"accuracy": 1.0}, 3, "stop", "reasoning", "en")
    write_rows(tmp_path / "a.parquet", [PROBLEM, PROBLEM], Problem)
    write_rows(tmp_path / "b.parquet", [sample], Sample)
    assert read_problems(tmp_path / "a.parquet") == [PROBLEM, PROBLEM]
    assert read_samples(tmp_path / "b.parquet") == [sample]


def test_columns_of_others_are_left_out(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{**ROW, "level": 3}]), tmp_path / "a.parquet")
    assert read_problems(tmp_path / "a.parquet")[0].metadata == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"metadata": "{not json"}, "metadata is '{not json', which is not JSON: Expecting property name"),
        ({"metadata": "[" * 100_000}, "metadata is .*, which is not JSON"),
        ({"metadata": "[1]"}, r"metadata is \[1\]; a JSON object is needed"),
        ({"metadata": None}, "metadata is None; a JSON object is needed"),
        ({"answer": None}, "answer is None; text is needed"),
        ({"verifier": None}, "verifier is None; text is needed"),
        ({"answer": 2}, "answer is 2; text is needed"),
        ({"messages": None}, "messages is None; a list of {role, content} is needed"),
        ({"messages": [{"role": "user", "content": None}]}, "messages is .*; a list of {role, content} is needed"),
        ({"messages": "1+1?"}, "messages is '1.1.'; a list of {role, content} is needed"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_place(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    pq.write_table(pa.Table.from_pylist([{**ROW, **wrong}]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=f"a.parquet, row 1: {message}") as caught:
        read_problems(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)


def test_rows_are_counted_over_a_whole_file(tmp_path: Path) -> None:
    rows = [ROW] * 5 + [{**ROW, "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(InputError, match="a.parquet, row 6: answer is None"):
        read_problems(tmp_path / "a.parquet")


def test_a_damaged_page_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [Problem(f"p{n}", MESSAGES, str(n) * 50, *("x",) * 4, {}) for n in range(500)], Problem)
    whole = bytearray(path.read_bytes())
    for place in range(200, len(whole) // 2, 7):
        whole[place] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(InputError, match="a.parquet: not a readable parquet file") as caught:
        read_problems(path)
    assert "\n" not in str(caught.value)
