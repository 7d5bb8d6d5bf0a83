"""Rows of mix sources: every known form gives the same example, every fault its file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from pydantic import ValidationError

from grpo.errors import InputError
from tasks.sft_data.given.rows import read_example, source_rows
from tasks.sft_data.given.settings import MixSource
from tasks.sft_data.mix_settings import MixSettings

ASKED, SAID = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello!"}
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello!"}]


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def source(**values: Any) -> MixSource:
    return MixSource.model_validate({"name": "talk", "path": Path("talk.jsonl"), **values})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": SHAREGPT},
        {"messages": SHAREGPT},
        {"prompt": "Hi?", "completion": "Hello!"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"question": "Hi?", "answer": "Hello!"},
        {"instruction": "Hi?", "output": "Hello!", "input": ""},
    ],
)
def test_every_form_gives_the_same_example(row: dict[str, Any]) -> None:
    assert read_example(source(), row, "talk.jsonl, line 1") == ([ASKED], "Hello!", "")


def test_columns_can_be_named_and_the_last_turn_is_learnt() -> None:
    named = source(prompt_column="q", completion_column="a", domain="reasoning", answer_column="gold")
    assert read_example(named, {"q": "1 + 1?", "a": "2.", "gold": 2}, "") == (
        *([{"role": "user", "content": "1 + 1?"}], "2.", "2"),
    )
    system = {"role": "system", "content": "Be kind."}
    turns = [system, ASKED, SAID, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    assert read_example(source(), {"messages": turns}, "") == (turns[:-1], "So.", "")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "columns are text; a row needs messages, conversations, or prompt and completion"),
        ({"messages": [ASKED]}, "messages must end with a message of role assistant"),
        ({"messages": [SAID]}, "messages must have a message of role user right before the response"),
        ({"conversations": [{"from": "tool", "value": "x"}]}, "`from` is human, gpt or system"),
        ({"prompt": "Hi?", "completion": " "}, "completion is blank"),
        ({"prompt": "Hi?", "completion": [ASKED, SAID]}, "completion has 2 messages; give one of role assistant"),
        ({"prompt": 3, "completion": "x"}, "prompt is 3, a int; text is needed"),
    ],
)
def test_a_fault_is_named_with_its_place(row: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        read_example(source(), row, "talk.jsonl, line 7")
    assert str(raised.value).startswith("talk.jsonl, line 7: ") and said in str(raised.value)


def test_an_unknown_column_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match="line 1: column 'q' is missing; the columns are prompt, a; set prompt_column"):
        read_example(source(prompt_column="q", completion_column="a"), {"prompt": "?", "a": "!"}, "line 1")


def test_files_folders_and_saved_data_sets(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(3)]
    jsonl(tmp_path / "a.jsonl", *rows)
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder" / "train.parquet")
    for name in ("a.jsonl", "a.parquet", "saved", "folder"):
        read = [row for _, row in source_rows(source(path=tmp_path / name, limit=2))]
        assert read == rows[:2], name


def test_an_empty_or_missing_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty.jsonl: the file is empty"):
        source_rows(source(path=tmp_path / "empty.jsonl"))
    with pytest.raises(InputError, match="there are no rows; mix source 'talk' needs some"):
        source_rows(source(path=jsonl(tmp_path / "blank.jsonl", "", "")))
    with pytest.raises(InputError, match="no such file"):
        source_rows(source(path=tmp_path / "none.jsonl"))


ONE = {"name": "talk", "path": "talk.jsonl"}


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([{**ONE, "count": 3, "share": 1}], "give count or share, not both"),
        ([ONE, {**ONE, "path": "b.jsonl"}], "two mix sources are called 'talk'"),
        ([ONE, {**ONE, "name": "again"}], "mix sources 'talk' and 'again' are both talk.jsonl; remove one"),
        ([{**ONE, "dataset": "a/b"}], "give either path or dataset"),
        ([{"name": "talk"}], "give either path or dataset"),
        ([{**ONE, "prompt_column": "q"}], "give prompt_column and completion_column, or neither"),
        ([{**ONE, "domain": "reasoning"}], "answer_column belongs to domain 'reasoning', which needs it"),
        ([{**ONE, "verifier": "none"}], "checks no given row"),
        ([{**ONE, "name": "general", "count": 1}], "has the name of a part"),
        ([{**ONE, "colour": "red"}], "colour"),
    ],
)
def test_settings_that_do_not_go_together(sources: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        MixSettings.model_validate({"sources": sources})


def test_a_source_with_a_size_is_named_by_no_part() -> None:
    parts = {"chat": {"sources": ["ta*"]}}
    with pytest.raises(ValidationError, match="has a size of its own, but part 'chat' names it"):
        MixSettings.model_validate({"parts": parts, "sources": [{**ONE, "count": 1}]})


def test_sizes_and_parts() -> None:
    # 1,000 in all: 100 of the count, and the other 900 by 626,933 : 177,812 : 200,000.
    sources = [{**ONE, "count": 100}, {**ONE, "name": "b", "path": "b", "share": 200_000}, {"name": "c", "path": "c"}]
    mix = MixSettings.model_validate({"total": 1000, "sources": sources})
    assert mix.wanted() == {"reasoning": 562, "general": 159, "talk": 100, "b": 179}
    assert [mix.part_of(name, "general") for name in ("talk", "b", "c")] == ["talk", "b", "general"]


def test_without_sources_the_settings_are_recorded_as_before() -> None:
    assert "sources" not in MixSettings().model_dump()
