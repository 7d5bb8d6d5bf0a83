from __future__ import annotations

from pathlib import Path

import pytest

from grpo.data.completions import TextCompletion
from grpo.sampling.journal import Journal


@pytest.mark.parametrize(("text", "stored"), [("a\ud83d b", "a? b"), ("\ude00", "?"), ("a \U0001f600", "a \U0001f600")])
def test_half_a_surrogate_pair_of_any_engine_can_be_stored(text: str, stored: str, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "shard.journal")
    journal.append([TextCompletion(text, 3, True).text])
    assert journal.lines() == [[stored]]
    journal.close()
