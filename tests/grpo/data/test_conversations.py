"""The columns that data sets are written in, and those that earlier versions wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.data.conversations import (
    CONVERSATION,
    demonstrations,
    from_columns,
    read_rows_of,
    response,
    response_column,
    to_columns,
)
from grpo.errors import InputError

ASKED = [{"role": "user", "content": "1 + 1?"}]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"problem_id": "a", "messages": ASKED, "completion": "2"},
    "pair": {"messages": ASKED, "chosen": "2", "rejected": "3", "strength": 1.5, "held_out": False},
    "label": {"messages": ASKED, "response": "2", "label": 1, "held_out": True},
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_names_and_forms() -> None:
    said = [{"role": "assistant", "content": "2"}]
    assert to_columns(ROWS["sft"]) == {"problem_id": "a", "prompt": ASKED, "completion": said}
    assert to_columns(ROWS["pair"]) | {"rejected": None} == {
        **{"prompt": ASKED, "chosen": said, "rejected": None, "strength": 1.5, "held_out": False}
    }
    assert to_columns(ROWS["label"]) == {"prompt": ASKED, "completion": said, "label": True, "held_out": True}


@pytest.mark.parametrize("kind", ROWS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    row = ROWS[kind]
    assert from_columns(to_columns(row)) == row == from_columns(row)
    columns, optional = tuple(row)[:3], tuple(row)[3:]
    new, old = write(tmp_path / "new.parquet", [to_columns(row)] * 2), write(tmp_path / "old.parquet", [row] * 2)
    assert read_rows_of(new, columns, optional) == read_rows_of(old, columns, optional) == [row, row]


def test_demonstrations_of_either_form(tmp_path: Path) -> None:
    rows = [{**ROWS["sft"], "completion": str(i)} for i in range(5)]
    (tmp_path / "new").mkdir()
    write(tmp_path / "new" / "part-00000.parquet", [to_columns(row) for row in rows[:3]])
    write(tmp_path / "new" / "part-00001.parquet", [to_columns(row) for row in rows[3:]])
    expected = [{"messages": ASKED, "completion": str(i)} for i in range(5)]
    assert list(demonstrations(tmp_path / "new", batch_rows=2)) == expected
    assert list(demonstrations(write(tmp_path / "old.parquet", rows))) == expected


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"prompt": ASKED, "answer": "2"}])
    with pytest.raises(InputError, match="column 'completion' is missing; .* needs prompt, completion"):
        next(demonstrations(path))
    with pytest.raises(InputError, match="not a readable parquet file"):
        next(demonstrations(tmp_path / "none.parquet"))
    with pytest.raises(InputError, match="column 'chosen' is missing"):
        read_rows_of(path, ("messages", "chosen", "rejected"))


def test_a_column_of_texts_becomes_one_of_conversations() -> None:
    column = response_column(pa.chunked_array([["a"], ["b", "c"]]))
    assert column.type == CONVERSATION and column.to_pylist() == [response(text) for text in "abc"]
    assert response_column(pa.array(["a", "b"]).slice(1)).to_pylist() == [response("b")]
