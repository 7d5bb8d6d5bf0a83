"""Training sequences in memory."""

from __future__ import annotations

import sys

from grpo.data.examples import Example, compact


def test_compact_ids_are_the_same_at_4_bytes_a_token() -> None:
    ids = [7, 300, 151_935, 2**32 - 1]  # what uint32 holds, as the shards of SFT data do
    example = Example([compact(ids)], [compact(ids[:1])], weight=1)
    assert [*example.prompts[0], *example.rests[0]] == [*ids, 7] and example.tokens == 5
    long = compact(range(1000, 101_000))
    assert sys.getsizeof(long) < 100_000 * 4 * 1.15 and long[5:7].tolist() == [1005, 1006]
