"""Token shards: what is read is what was tokenised; a killed writer goes on; nothing of other data is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo.data import token_shards
from grpo.data.examples import Example
from grpo.data.token_shards import SAMPLE_BYTES, TokenShards, start, write

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(token_shards, "SHARD_ROWS", 4)
    monkeypatch.setattr(token_shards, "BATCH_ROWS", 3)


def rows(count: int) -> list[Row]:
    return [{"number": number} for number in range(count)]


def tokenize(batch: list[Row]) -> list[Example]:
    """Row n: a prompt of n % 3 + 1 tokens and a completion of the token 70,000 + n; rows 4 to 7 are too long."""
    numbers = [row["number"] for row in batch if row["number"] not in range(4, 8)]
    return [Example([[n] * (n % 3 + 1)], [[70_000 + n]], weight=1) for n in numbers]


def refuse(batch: list[Row]) -> list[Example]:
    raise AssertionError("tokenised again")


def test_sequences_come_back_in_the_order_of_the_data(tmp_path):
    start(tmp_path / "tokens", {})
    write(tmp_path / "tokens", rows(14), 14, tokenize)
    read = TokenShards(tmp_path / "tokens", 14)
    assert [*read] == tokenize(rows(14))  # 4 shards, the second of them empty, the last one short
    assert (len(read), read.left_out) == (10, 4)
    assert read.tokens().tolist() == [example.tokens for example in read]
    assert read[4] == Example([[8, 8, 8]], [[70_008]], weight=1) and read[-1] == read[9] and read[2:4] == [*read][2:4]
    with pytest.raises(IndexError):
        read[10]


def test_processes_write_a_share_each(tmp_path):
    start(tmp_path, {})
    for rank in (0, 1, 2):
        write(tmp_path, rows(14), 14, tokenize, rank, 3)
        written = sorted(path.name for path in tmp_path.glob("*.lengths.npy"))
        assert len(written) == [2, 3, 4][rank]  # of 4 shards: 0 and 3, then 1, then 2
    assert [*TokenShards(tmp_path, 14)] == tokenize(rows(14))


def test_a_killed_writer_goes_on_where_it_was(tmp_path):
    seen: list[int] = []

    def dies(batch: list[Row]) -> list[Example]:
        seen.extend(row["number"] for row in batch)
        if 9 in seen:
            raise KeyboardInterrupt
        return tokenize(batch)

    start(tmp_path, {"rows": 14})
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, rows(14), 14, dies)
    again: list[int] = []
    start(tmp_path, {"rows": 14})
    write(tmp_path, rows(14), 14, lambda batch: again.extend(row["number"] for row in batch) or tokenize(batch))
    assert again == [*range(8, 14)]  # shards 0 and 1 were whole
    assert [*TokenShards(tmp_path, 14)] == tokenize(rows(14))
    write(tmp_path, rows(14), 14, refuse)


def test_shards_of_other_data_are_made_again(tmp_path):
    folder = tmp_path / "tokens"
    for source, count in (({"files": 1}, 14), ({"files": 2}, 3)):
        start(folder, source)
        write(folder, rows(count), count, tokenize)
        assert [*TokenShards(folder, count)] == tokenize(rows(count))
    assert len([*folder.glob("*.ids.npy")]) == 1


def test_nothing_at_all(tmp_path):
    start(tmp_path, {})
    write(tmp_path, [], 0, tokenize)
    assert not TokenShards(tmp_path, 0)
    start(tmp_path, {"rows": 8})
    write(tmp_path, rows(8)[4:], 4, tokenize)
    assert not TokenShards(tmp_path, 4)


def test_tokens_are_mapped_and_a_sequence_costs_what_the_estimate_says(tmp_path):
    start(tmp_path, {})
    write(tmp_path, rows(14), 14, tokenize)
    read = TokenShards(tmp_path, 14)
    held = [value for value in vars(read).values() if isinstance(value, np.ndarray) and len(value) == len(read)]
    assert sum(array.itemsize for array in held) == SAMPLE_BYTES - 36
    assert all(ids is None or isinstance(ids, np.memmap) for ids in read._ids)
    assert {ids.dtype for ids in read._ids if ids is not None} == {np.dtype(np.uint32)}
