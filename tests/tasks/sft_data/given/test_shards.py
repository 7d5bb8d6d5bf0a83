"""Given rows as samples: they pass the filters, the duplicates' check and the mix that sampled ones pass."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo.config.common import Optimizer
from grpo.config.supervised import Pretrain
from grpo.data.conversations import from_columns
from grpo.data.records import Problem, read_problems, read_samples, write_rows
from grpo.errors import InputError
from grpo.training.pretrain import train_tokenizer
from tasks.sft_data.card import card
from tasks.sft_data.given.settings import MixSource
from tasks.sft_data.given.shards import GivenShard, take
from tasks.sft_data.mix import TRAIN, mix
from tasks.sft_data.mix_settings import MixSettings
from tasks.sft_data.rejection import select_shard
from tasks.trainer.processes import Failure, Pool

LONG = "one two three four five six seven eight nine ten eleven"
ROWS: list[tuple[str, str, str]] = [  # prompt, completion, what becomes of it
    ("Hi?", "Hello!", "kept"),
    ("Hi?", "Good day to you!", "kept"),
    ("Hi?", "Hello!", "duplicate"),
    (LONG, "A list of numbers.", "contaminated"),
    ("Count.", f"Well: {LONG}", "contaminated"),
    ("Why?", "<think>\nbecause it is so\n</think>\n\nSo.", "kept"),
    ("Why not?", "<think>\nbecause", "malformed"),
    ("Und?", "<think>\nweil das nun einmal so ist und nicht anders\n</think>\nGut.", "mixed_language"),
    ("Loop", "again and " * 60, "repetition"),
    ("Code", "<think>\n```x```\n</think>\nDone.", "code_in_reasoning"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = Pretrain(vocabulary=320, steps=1, context=128, optimizer=Optimizer(learning_rate=1e-3))
    train_tokenizer([text for row in ROWS for text in row] * 4, settings).save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def pairs(*rows: tuple[str, str]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in rows]


def arguments(shard: GivenShard, tokenizer: str, folder: Path, **scoring: float) -> tuple[Any, ...]:
    """Those of `select_shard`."""
    held_out = [Problem("h", [{"role": "user", "content": LONG}], "", "none", "general", "en", "x")]
    write_rows(folder / "held_out.parquet", held_out, Problem)
    settings: dict[str, Any] = {
        "filters": {},
        "judge": '{"kind": "rule"}',
        "judged": [],
        "keep_per_problem": 99,
        "seed": 0,
    }
    settings |= {"held_out": [str(folder / "held_out.parquet")], "tokenizer": tokenizer, "scoring": scoring}
    return shard.samples, shard.problems, folder / f"{shard.samples.stem}.parquet", settings


def filtered(shard: GivenShard, tokenizer: str, folder: Path) -> Path:
    of_shard = arguments(shard, tokenizer, folder)
    select_shard(*of_shard)
    return of_shard[2]


@pytest.mark.parametrize("size", [100, 3])
def test_filters_and_mix(size: int, tokenizer: str, tmp_path: Path) -> None:
    """The same outcome whatever the shards' size: duplicates in other shards are the mix's."""
    path = write(tmp_path / "talk.jsonl", pairs(*((prompt, text) for prompt, text, _ in ROWS)))
    source = MixSource(name="talk", path=path, count=100, licence="mit")
    taken = take(source, tmp_path / "given", size)
    assert taken.counts == {"rows": 10, "taken": 10, "bad_records": 0} and len(taken.shards) == -(-10 // size)
    paths = {filtered(shard, tokenizer, tmp_path): shard for shard in taken.shards}
    settings = MixSettings(sources=[source])
    known = {path: {p.id: p for p in read_problems(shard.problems)} for path, shard in paths.items()}
    statistics = mix([*paths], lambda path: known[path], settings, 0, tmp_path / "out")
    assert statistics["outcomes"] == Counter(outcome for *_, outcome in ROWS)
    assert statistics["parts"]["talk"] | {"train": 0} == {
        **{"wanted": 100, "sampled": 10, "kept": 3, "shortage": 97, "train": 0, "validation": 0}
    }
    written = [from_columns(row) for row in pq.read_table(tmp_path / "out" / TRAIN).to_pylist()]
    assert {(row["messages"][0]["content"], row["completion"], row["think"]) for row in written} == {
        ("Hi?", "Hello!", False),
        ("Hi?", "Good day to you!", False),
        ("Why?", "<think>\nbecause it is so\n</think>\n<answer>So.</answer>", True),
    }
    assert {row["source"] for row in written} == {"talk"} and all(row["tokens"] > 0 for row in written)
    assert "| talk | 10 | 3 | mit |" in card(statistics, {})


def test_reasoning_rows_are_verified(tokenizer: str, tmp_path: Path) -> None:
    said = [r"so \boxed{\frac{1}{2}}", r"so \boxed{3}", "<think>\nhalf\n</think>\n<answer>0.5</answer>", "1/2"]
    rows = [{"prompt": f"half? {i}", "completion": text, "gold": "1/2"} for i, text in enumerate(said)]
    path = write(tmp_path / "maths.jsonl", rows)
    source = MixSource(name="maths", path=path, domain="reasoning", answer_column="gold")
    (shard,) = take(source, tmp_path / "given", 100).shards
    verdicts = {s.number: s.reason for s in read_samples(filtered(shard, tokenizer, tmp_path))}
    assert verdicts == {0: "", 1: "incorrect", 2: "", 3: ""}


def test_a_judge_compares_the_answer_that_the_rule_found(tokenizer: str, tmp_path: Path) -> None:
    """Where the form's place is empty: in a box, after GSM8K's four hashes, or the whole text."""
    steps = "Half of 4,800 is <<4800/2=2400>>2,400.\n#### 2,400"
    rows = [
        {"question": "3 + 4?", "answer": r"so \boxed{7}", "gold": "7"},
        {"question": "half of 4,800?", "answer": steps, "gold": steps},
        {"question": "1 + 1?", "answer": "2", "gold": "#### 2"},
        {"question": "2 + 2?", "answer": "so 5\n#### 5", "gold": "so 4\n#### 4"},
    ]
    path = write(tmp_path / "maths.jsonl", rows)
    source = MixSource(name="maths", path=path, domain="reasoning", answer_column="gold", judged=True)
    (shard,) = take(source, tmp_path / "given", 100).shards
    assert [problem.answer for problem in read_problems(shard.problems)] == ["7", "2400", "2", "4"]
    *files, settings = arguments(shard, tokenizer, tmp_path)
    select_shard(files[0], files[1], files[2], settings | {"judged": ["reasoning"]})
    found = [(sample.answer, sample.reason) for sample in read_samples(files[2])]
    assert found == [("7", ""), ("2400", ""), ("2", ""), ("", "incorrect")]


def verified(folder: Path, *rows: tuple[str, str]) -> GivenShard:
    """A shard of reasoning rows, each the box and the reference, with the same prompt."""
    lines = [{"prompt": "?", "completion": rf"so \boxed{{{said}}}", "gold": gold} for said, gold in rows]
    path = write(folder / "maths.jsonl", lines)
    source = MixSource(name="maths", path=path, domain="reasoning", answer_column="gold")
    return take(source, folder / "given", 100).shards[0]


def test_an_answer_that_cannot_be_checked_in_time_is_incorrect(tokenizer: str, tmp_path: Path) -> None:
    shard = verified(tmp_path, ("7", "7"), ("9^{9^{9}}", "7"), ("8 - 1", "7"))
    of_shard = arguments(shard, tokenizer, tmp_path, time_limit_s=5)
    with Pool(1, 120, None) as pool:  # the stage allows a day
        assert not isinstance(pool.submit(select_shard, *of_shard).result(), Failure)
    assert [s.rewards["accuracy"] for s in read_samples(of_shard[2])] == [1, 0, 1]
    assert [s.reason for s in read_samples(of_shard[2])] == ["", "incorrect", ""]


def test_rows_with_one_prompt_have_references_of_their_own(tokenizer: str, tmp_path: Path) -> None:
    shard = verified(tmp_path, ("4", "4"), ("5", "5"), ("5", "4"))
    samples = read_samples(filtered(shard, tokenizer, tmp_path))
    assert [sample.rewards["accuracy"] for sample in samples] == [1, 1, 0]
    assert samples[0].problem_id == samples[2].problem_id != samples[1].problem_id


def test_ids_without_a_reference(tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", pairs(("Hi?", "Hello!")))
    (shard,) = take(MixSource(name="talk", path=path), tmp_path / "given", 9).shards
    identity = '["talk", [{"role": "user", "content": "Hi?"}]]'
    assert read_samples(shard.samples)[0].problem_id == hashlib.sha256(identity.encode()).hexdigest()[:16]


def test_a_thought_is_brought_into_the_form_of_the_problems(tmp_path: Path) -> None:
    said = "<think>\nhalf of it\n</think>\nSo \\boxed{5}."
    path = write(tmp_path / "maths.jsonl", [{"prompt": "?", "completion": said, "gold": "5"}])
    maths = MixSource(name="maths", path=path, domain="reasoning", answer_column="gold")
    for style, expected in (("tags", "<think>\nhalf of it\n</think>\n<answer>5</answer>"), ("boxed", said)):
        (shard,) = take(maths, tmp_path / style, 9, style).shards  # type: ignore[arg-type]
        (sample,) = read_samples(shard.samples)
        assert (sample.completion, sample.answer) == (expected, "5")


def test_a_record_that_a_kill_left_empty_is_made_again(tmp_path: Path) -> None:
    source = MixSource(name="talk", path=write(tmp_path / "talk.jsonl", pairs(("Hi?", "Hello!"))))
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "taken.json").touch()
    for _ in range(2):
        assert take(source, tmp_path / "given", 9).counts == {"rows": 1, "taken": 1, "bad_records": 0}


def test_bad_records_stop_or_are_skipped_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "talk.jsonl", [*pairs(("a", "b")), "{", *pairs(("c", "d"))])
    with pytest.raises(InputError, match=r"talk.jsonl, line 2: not JSON"):
        take(MixSource(name="talk", path=path), tmp_path / "stop", 10)
    for _ in range(2):  # the second call reads what the first wrote
        taken = take(MixSource(name="talk", path=path, on_bad_record="skip"), tmp_path / "skip", 10)
        assert taken.counts == {"rows": 3, "taken": 2, "bad_records": 1} and "line 2" in taken.bad_records[0]
    write(path, ["{"])
    with pytest.raises(InputError, match="mix source 'talk': no usable row, 1 bad ones, the first: .*line 1"):
        take(MixSource(name="talk", path=path, on_bad_record="skip"), tmp_path / "none", 10)
