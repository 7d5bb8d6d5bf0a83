"""Preference files: every format gives the pairs that can be written down by hand, every fault its file and line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo.errors import InputError
from tasks.preferences.files import Loaded, PreferenceFile, load_preferences
from tasks.preferences.rows import write_preferences

QUESTION = {"role": "user", "content": "How are you?"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "given.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def load(path: Path, **settings: Any) -> Loaded:
    return load_preferences(PreferenceFile(path=path, **settings), held_out_share=0.0)


def pairs(loaded: Loaded) -> list[tuple[str, str, float]]:
    return [(row["chosen"], row["rejected"], row["strength"]) for row in loaded.pairs]


CONVERSATIONS = {"chosen": [QUESTION, said("Well!")], "rejected": [QUESTION, said("Go away")]}


@pytest.mark.parametrize(
    "row",
    [
        CONVERSATIONS,
        {"prompt": "How are you?", "chosen": "Well!", "rejected": "Go away"},
        {"prompt": [QUESTION], "chosen": [said("Well!")], "rejected": [said("Go away")]},
        {"prompt": "How are you?", **CONVERSATIONS},
        {"prompt": "How are you?", "chosen": "<think>hm</think>\nWell!", "rejected": "<think>oh</think>Go away"},
        {"prompt": "How are you?", "responses": ["Go away", "Well!"], "ranks": [2, 1]},
    ],
)
def test_every_format_of_a_pair_says_the_same(row: dict[str, Any], tmp_path: Path) -> None:
    loaded = load(jsonl(tmp_path, row))
    assert loaded.pairs == [
        {
            "messages": [QUESTION],
            "chosen": "Well!",
            "rejected": "Go away",
            "strength": 1.0,
            "source": "file/given.jsonl",
            "held_out": False,
        }
    ]


def test_earlier_turns_are_the_prompt(tmp_path: Path) -> None:
    before = [{"role": "system", "content": "Be kind."}, QUESTION, said("Well."), {"role": "user", "content": "Why?"}]
    loaded = load(jsonl(tmp_path, {"chosen": [*before, said("The sun!")], "rejected": [*before, said("No.")]}))
    assert loaded.pairs[0]["messages"] == before


def test_a_ranked_list_gives_every_pair_of_different_rank(tmp_path: Path) -> None:
    # Four responses are six pairs; b and c share a rank, so five say something.
    row = {"prompt": "?", "responses": ["d", "b", "a", "c"], "ranks": [3, 2, 1, 2]}
    loaded = load(jsonl(tmp_path, row))
    better = {(row["chosen"], row["rejected"]) for row in loaded.pairs}
    assert better == {("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")}
    assert loaded.counts == {"rows": 1, "bad_records": 0, "tied": 1, "pairs": 5, "labels": 0}


@pytest.mark.parametrize(
    ("safe", "unsafe"), [(True, False), (1, 0), ("safe", "unsafe"), ("Safe", "UNSAFE"), (1.0, 0.0)]
)
def test_labels_are_read_in_every_way_and_keep_the_reasoning(safe: Any, unsafe: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "?", "response": f"<think>a</think>{label}", "label": label} for label in (safe, unsafe)]
    loaded = load(jsonl(tmp_path, *rows))
    assert [row["label"] for row in loaded.labels] == [1, 0]
    assert loaded.labels[0]["response"] == f"<think>a</think>{safe}"


def test_a_policy_learns_from_whole_responses(tmp_path: Path) -> None:
    said = {"chosen": "<think>hm</think>\nWell!", "rejected": "<think>oh</think>Go away"}
    path = jsonl(tmp_path, {"prompt": "How are you?", **said})
    (pair,) = load_preferences(PreferenceFile(path=path), held_out_share=0.0, whole=True).pairs
    assert {name: pair[name] for name in said} == said


def test_what_we_write_is_read_again(tmp_path: Path) -> None:
    given = [{"prompt": "?", "response": "a", "label": 1}, {"prompt": "?", "chosen": "b", "rejected": "c"}]
    loaded = load(jsonl(tmp_path, *given))
    write_preferences(tmp_path / "labels.parquet", loaded.labels)
    write_preferences(tmp_path / "pairs.parquet", loaded.pairs)
    labels, pairs = load(tmp_path / "labels.parquet").labels, load(tmp_path / "pairs.parquet").pairs
    assert [(r["messages"], r["response"], r["label"]) for r in labels] == [
        ([{"role": "user", "content": "?"}], "a", 1)
    ]
    assert [(r["chosen"], r["rejected"]) for r in pairs] == [("b", "c")]


def test_csv_and_parquet_say_the_same_as_jsonl(tmp_path: Path) -> None:
    ranked = {"prompt": "Say it", "responses": ["a", "b", "c"], "ranks": [1, 2, 2]}
    plain = {"prompt": "And, then", "chosen": "Well\nthen", "rejected": "no", "strength": 1.5}
    label = {"prompt": "Now", "response": "ok", "label": 0}
    found = load(jsonl(tmp_path, ranked, plain, label))
    columns = ["prompt", "responses", "ranks", "chosen", "rejected", "strength", "response", "label"]
    with (tmp_path / "given.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([{k: json.dumps(v) if isinstance(v, list) else v for k, v in ranked.items()}, plain, label])
    pq.write_table(
        pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in (ranked, plain, label)]),
        tmp_path / "given.parquet",
    )
    assert pairs(found) == [("a", "b", 1.0), ("a", "c", 1.0), ("Well\nthen", "no", 1.5)]
    for name in ("given.csv", "given.parquet"):
        other = load(tmp_path / name)
        assert (pairs(other), [r["label"] for r in other.labels]) == (pairs(found), [0])


GOOD = {"prompt": "?", "chosen": "a", "rejected": "b"}
FAULTS: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ({"prompt": "?", "text": "a"}, "filled columns are prompt, text; a row needs prompt, responses, ranks; or"),
    ({"chosen": "a", "rejected": "b"}, "chosen is 'a', a str; a list is needed; with text give the column prompt too"),
    ({**GOOD, "rejected": "a"}, "the same summary 'a'"),
    ({**GOOD, "rejected": "  "}, "rejected is blank"),
    ({**GOOD, "chosen": "<think>so</think> "}, "chosen has nothing after its reasoning"),
    ({**GOOD, "strength": -1}, "strength is -1"),
    ({**GOOD, "strength": "much"}, "strength holds 'much'; a number is needed"),
    ({**GOOD, "prompt": [QUESTION, said("x")]}, "prompt must have a message of role user right before the response"),
    ({**GOOD, **CONVERSATIONS}, "chosen begins otherwise than prompt"),
    ({"chosen": [QUESTION, said("a")], "rejected": [said("b")]}, "chosen and rejected differ before the last message"),
    ({"chosen": [QUESTION], "rejected": [QUESTION]}, "chosen must end with a message of role assistant"),
    ({"chosen": [], "rejected": [QUESTION]}, "chosen must end with a message of role assistant"),
    ({"chosen": [{"role": "bot"}], "rejected": []}, "a message is {role, content}"),
    ({"prompt": "?", "responses": ["a", "b"], "ranks": [1]}, "2 responses and 1 ranks"),
    ({"prompt": "?", "responses": ["a"], "ranks": [1]}, "give two or more responses"),
    ({"prompt": "?", "responses": ["a", "b"], "ranks": [1, None]}, "ranks holds None"),
    (
        {"prompt": "?", "completion": [QUESTION, said("a")], "label": 1},
        "completion has 2 messages; give the last alone",
    ),
    ({"prompt": "?", "responses": "a", "ranks": [1]}, "responses is 'a', a str; a list is needed"),
    ({"prompt": "?", "responses": "[a", "ranks": [1]}, "responses begins as a list but is not JSON"),
    ({"prompt": "?", "response": "a", "label": "harmless"}, "label is 'harmless'; give true"),
    ({"prompt": "?", "response": "a", "label": 0.5}, "label is 0.5"),
    ({"prompt": "?", "response": "a", "label": [1]}, "label is [1]"),
]


@pytest.mark.parametrize(("row", "fault"), FAULTS)
def test_a_fault_is_named_with_file_and_line_or_skipped(row: Any, fault: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD, row)
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line 2: ") and fault in str(caught.value)
    assert "\n" not in str(caught.value)
    loaded = load(path, on_bad_record="skip")
    assert pairs(loaded) == [("a", "b", 1.0)]
    assert loaded.bad_records == [str(caught.value)] and loaded.counts["bad_records"] == 1


def test_a_file_that_gives_nothing_says_why(tmp_path: Path) -> None:
    tie = {"prompt": "?", "responses": ["a", "b"], "ranks": [1, 1]}
    with pytest.raises(InputError, match=r"no preference left of 1 rows \(1 tied pairs\)"):
        load(jsonl(tmp_path, tie))
    with pytest.raises(InputError, match=r"no preference left of 1 rows, 1 of them bad records, the first: .*line 1"):
        load(jsonl(tmp_path, "{"), on_bad_record="skip")


def test_limit_counts_rows_from_the_start(tmp_path: Path) -> None:
    assert load(jsonl(tmp_path, GOOD, "{"), limit=1).counts["rows"] == 1
