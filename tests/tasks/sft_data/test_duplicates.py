"""Which pairs of prompt and completion are the same, and which pairs of completions nearly so."""

from __future__ import annotations

import random

import pytest

from tasks.sft_data.duplicates import Shingles, completion_digest


@pytest.mark.parametrize(
    ("prompt", "completion", "same"),
    [
        ("1 + 2", "so it is 3", True),
        ("1  + 2\n", " So\nit is\t3 ", True),  # white space and case
        ("1 + 2", "so it is3", False),
        ("1 + 2", "so it is 3.", False),
        ("1 + 3", "so it is 3", False),  # another prompt
        ("1 + 2 so", "it is 3", False),  # the border counts
    ],
)
def test_digests(prompt: str, completion: str, same: bool) -> None:
    assert (completion_digest(prompt, completion) == completion_digest("1 + 2", "so it is 3")) is same


def test_composed_and_decomposed_letters_are_the_same() -> None:
    assert completion_digest("", "L\u00f6sung") == completion_digest("", "Lo\u0308sung")


def test_a_digest_is_64_bits_and_stays_what_it_is() -> None:
    # BLAKE2b with 8 bytes of "1 + 2", a zero byte and "so it is 3", read as a little-endian number.
    assert completion_digest("1 + 2", "so it is 3") == DIGEST
    assert max(completion_digest("", str(i)) for i in range(100)) >= 2**63  # unsigned


DIGEST = 320595084196103787


@pytest.mark.parametrize(
    ("a", "b", "size", "jaccard"),
    [
        ("a b c d", "a b c d e", 1, 4 / 5),
        ("a b c", "a b c d", 1, 3 / 4),
        ("a b c d e", "a b c d e f", 2, 4 / 5),  # ab bc cd de; and ef
        ("a b c", "c b a", 2, 0.0),
        ("a b a b a b", "a b a", 2, 1.0),  # sets: ab ba
        ("A  b\nc", "a b c d", 1, 3 / 4),  # case and white space
        ("一二三", "一二三四", 2, 2 / 3),  # characters are words where there are no spaces
        ("a b", "a b", 5, 1.0),  # fewer words than a shingle has
        ("a b", "a b c", 5, 0.0),
        ("", "", 5, 1.0),
        ("", "a", 5, 0.0),
    ],
)
def test_jaccard(a: str, b: str, size: int, jaccard: float) -> None:
    x, y = Shingles(a, size), Shingles(b, size)
    assert x.jaccard(y) == y.jaccard(x) == jaccard
    for threshold in (0.75, 0.8, 1.0):
        assert x.near(y, threshold) is y.near(x, threshold) is (jaccard >= threshold)


def test_the_signatures_lose_no_near_duplicate() -> None:
    rng = random.Random(0)
    near = 0
    for _ in range(2000):
        words = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(5, 120))]
        changed = [w if rng.random() > 0.03 else "new" for w in words]
        x, y = Shingles(" ".join(words), 3), Shingles(" ".join(changed), 3)
        assert x.near(y, 0.8) is (x.jaccard(y) >= 0.8)
        near += x.near(y, 0.8)
    assert 500 < near < 1800
